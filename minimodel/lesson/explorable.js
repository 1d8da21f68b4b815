// Makes one explorable live: builds its controls, and draws its pictures again as they move.
// The whole file is one function, shipped inside every output, so that each stands alone; it
// touches nothing outside `root`. `spec` comes from explorable.py; `compute` is the author's pure
// function. The pictures are those of pictures.py, to the same markup.
(root, spec, compute) => {
  if (root.explorable) return;
  const [panel, picture, says, table] =
    [".ss-panel", ".ss-picture", ".ss-says", "tbody"].map(name => root.querySelector(name));
  const {width: WIDTH, row: ROW, barTop, bar: BAR, left, right, top, bottom, height, most, advance} =
    spec.sizes;

  // --- values and words ---

  const escape = text => String(text).replace(/[&<>"']/g, mark => `&#${mark.charCodeAt(0)};`);
  const commas = text => text.replace(/^-?\d+/, whole => whole.replace(/\B(?=(\d{3})+$)/g, ","));
  const number = value => {
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number") return String(value);
    if (!Number.isFinite(value)) throw new Error(`${value} is no number to show`);
    if (Number.isInteger(value)) return commas(String(value));
    const places = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
    const shown = commas(value.toFixed(places));
    return places ? shown.replace(/\.?0+$/, "") : shown;
  };
  const valueOf = (values, source) => {
    if (typeof source !== "string") return source;
    if (!(source in values)) throw new Error(`nothing is called ${source}`);
    return values[source];
  };
  const fill = (template, values) =>
    template.replace(/\{(\w+)\}/g, (_, name) => number(valueOf(values, name)));
  const plain = item => {
    if (!Array.isArray(item)) return number(item);
    const words = item.slice(0, most).map(
      one => Array.isArray(one) ? `${one[0]} (${one[1] || "unmarked"})` : number(one));
    return words.join(", ") + (item.length > most ? " ..." : "");
  };
  const coordinate = position => String(Math.floor(position * 100 + 0.5) / 100);
  const list = item => Array.isArray(item) ? item : [item];

  // --- the four pictures ---

  const place = (axis, value, start, end) => {
    const scaled = v => !axis.log ? v : v > 0 ? Math.log10(v) : -Infinity;
    const share = (scaled(value) - scaled(axis.low)) / (scaled(axis.high) - scaled(axis.low));
    return start + Math.min(9, Math.max(-9, share)) * (end - start);
  };
  const svg = (tall, title, inside) =>
    `<svg viewBox="-1 0 ${WIDTH + 2} ${coordinate(tall)}" role="img" ` +
    `aria-label="${escape(title)}">${inside}</svg>`;
  const titled = (title, inside) =>
    `<div class="ss-part"><p class="ss-title">${escape(title)}</p>${inside}</div>`;
  const diamond = "m-7 0l7 -7l7 7l-7 7z";

  const bar = (one, y, length, axis, unit, values) => {
    const words = one.text ? fill(one.text, values) : `${number(length)} ${unit}`.trim();
    const end = coordinate(Math.min(WIDTH, Math.max(0, place(axis, length, 0, WIDTH))));
    const mark = one.kind === "reported"
      ? `<path class="reported" d="M0 ${y + barTop + BAR / 2}H${end}${diamond}"></path>`
      : `<rect class="${one.kind}" y="${y + barTop}" width="${end}" height="${BAR}" rx="2"></rect>`;
    return `<g style="${one.paint}"><text y="${y + 13}">${escape(fill(one.label, values))} ` +
      `<tspan>${escape(words)}</tspan></text>${mark}</g>`;
  };
  const marks = (line, places) => {
    const at = places.map(place => place.map(coordinate));
    let drawn = at.length > 1
      ? `<path class="line ${line.kind}" d="M${at.map(p => p.join(" ")).join("L")}"></path>` : "";
    if (line.dots && at.length <= most) drawn += at.map(([x, y]) => line.kind === "reported"
      ? `<path class="reported" d="M${x} ${y}${diamond}"></path>`
      : `<circle class="${line.kind} dot" cx="${x}" cy="${y}" r="5"></circle>`).join("");
    return `<g style="${line.paint}">${drawn}</g>`;
  };
  const label = (line, [px, py], words) => {
    const fits = px + 10 + advance * [...words].length <= WIDTH;
    const x = coordinate(fits ? px + 10 : px - 10);
    const y = coordinate(Math.min(bottom - 4, Math.max(top + 8, py + line.dy + 4)));
    return `<text class="label" style="${line.paint}" x="${x}" y="${y}" ` +
      `text-anchor="${fits ? "start" : "end"}">${escape(words)}</text>`;
  };
  const block = (part, text, meaning) =>
    `<mark class="${meaning || "none"}"${meaning ? ` style="${part.fills[meaning]}"` : ""}>` +
    `${escape(text)}</mark>`;

  const draw = {
    numbers: (part, values) => `<dl class="ss-numbers">${part.items.map(([template, name]) =>
      `<div><dt>${escape(fill(name, values))}</dt><dd>${escape(fill(template, values))}</dd></div>`
    ).join("")}</dl>`,

    bars: (part, values) => {
      const title = fill(part.title, values), tall = part.bars.length * ROW + (part.log ? 18 : 0);
      const lengths = part.bars.map(one => valueOf(values, one.value));
      const axis = {...part, high: part.high || Math.max(...lengths, 0) || 1};
      return titled(title, svg(tall, title, part.frame + part.bars.map(
        (one, i) => bar(one, i * ROW, lengths[i], axis, part.unit, values)).join("")));
    },

    lines: (part, values) => {
      const title = fill(part.title, values), [w, h] = [right - left + 16, bottom - top + 16];
      const places = part.lines.map(line => {
        const ys = list(valueOf(values, line.y));
        return list(valueOf(values, line.x)).map((x, i) =>
          [place(part.x, x, left, right), place(part.y, ys[i], bottom, top)]);
      });
      const inside = `<svg x="${left - 8}" y="${top - 8}" width="${w}" height="${h}" ` +
        `viewBox="${left - 8} ${top - 8} ${w} ${h}">` +
        part.lines.map((line, i) => marks(line, places[i])).join("") + "</svg>";
      const words = part.lines.map((line, i) => places[i].length
        ? label(line, places[i].at(line.at), fill(line.label, values)) : "").join("");
      return titled(title, svg(height, title, part.frame + inside + words));
    },

    spans: (part, values) => titled(fill(part.title, values), part.rows.map(([name, words]) =>
      `<p class="ss-spans"><b>${escape(fill(words, values))}</b>${valueOf(values, name).map(
        ([text, meaning]) => block(part, text, meaning)).join("")}</p>`).join("") +
      `<p class="ss-legend">${Object.entries(part.legend).map(([meaning, words]) =>
        `<span>${block(part, words, meaning)}</span> `).join("")}</p>`),
  };

  const render = inputs => {
    const outputs = compute({...inputs}, spec.data), values = {...inputs, ...outputs};
    return {
      says: fill(spec.says, values),
      picture: spec.picture.map(part => draw[part.draw](part, values)).join(""),
      table: Object.entries(values).map(([name, item]) => `<tr><th scope="row">` +
        `${escape(spec.names[name] || name)}</th><td>${escape(plain(item))}</td></tr>`).join(""),
    };
  };

  // --- the controls ---

  const now = {...spec.start}, refused = {};     // refused: key -> what is wrong with what is typed
  const tell = text => { if (says.textContent !== text) says.textContent = text; };
  const update = () => {
    const [complaint] = Object.values(refused);
    if (complaint) return tell(complaint);
    try {
      const drawn = render(now);
      picture.innerHTML = drawn.picture;
      table.innerHTML = drawn.table;
      tell(drawn.says);
    } catch (error) { tell(`This cannot be computed: ${error.message}`); }
  };

  // Each kind: the markup of its control, and how a value is read from it (undefined: refused).
  const kinds = {
    slider: [c => `<input type="range" min="0" max="${c.values.length - 1}" step="1">`,
             (c, input) => c.values[+input.value]],
    number: [c => `<input type="number" min="${c.low}" max="${c.high}" step="${c.step}">`,
             (c, input) => input.checkValidity() && input.value !== "" ? +input.value : undefined],
    choice: [c => `<select>${c.options.map(o => `<option>${escape(o[1])}</option>`).join("")}</select>`,
             (c, input) => c.options[input.selectedIndex][0]],
    checkbox: [() => `<input type="checkbox">`, (c, input) => input.checked],
    text: [c => (c.rows > 1 ? `<textarea rows="${c.rows}"` : `<input type="text"`) +
             ` maxlength="${c.limit}" spellcheck="false">` + (c.rows > 1 ? "</textarea>" : ""),
           (c, input) => input.value],
  };
  const put = (c, input, value) => {
    if (c.kind === "slider") input.value = c.values.indexOf(value);
    else if (c.kind === "choice") input.selectedIndex = c.options.findIndex(o => o[0] === value);
    else if (c.kind === "checkbox") input.checked = value;
    else input.value = value;
  };
  const build = c => {
    const holder = document.createElement("label");
    holder.className = `ss-control ss-is-${c.kind}`;
    holder.innerHTML = `<span>${escape(c.label)}</span> <b aria-hidden="true"></b>${kinds[c.kind][0](c)}`;
    const input = holder.lastElementChild, shown = holder.querySelector("b");
    const show = () => {
      if (c.kind !== "slider") return;
      shown.textContent = number(now[c.key]) + c.unit;
      input.setAttribute("aria-valuetext", shown.textContent);
    };
    const read = () => {
      const value = kinds[c.kind][1](c, input);
      delete refused[c.key];
      if (value === undefined) refused[c.key] = `${c.label}: ${c.rule}`;
      else now[c.key] = value;
      input.setAttribute("aria-invalid", value === undefined);
      show();
      update();
    };
    input.oninput = read;
    // Arrows are handled here: a notebook or a slide would take them to move on.
    if (c.kind === "slider" || c.kind === "choice") input.onkeydown = event => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const [name, sign] = c.kind === "slider" ? ["value", 1] : ["selectedIndex", -1];
      const last = (c.values || c.options).length - 1, at = +input[name];
      const to = {ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - sign, ArrowUp: at + sign,
                  Home: 0, End: last}[event.key];
      if (to === undefined) return;
      event.preventDefault();
      input[name] = Math.max(0, Math.min(last, to));
      read();
    };
    put(c, input, c.start);
    show();
    return holder;
  };

  panel.append(...spec.controls.map(build));
  panel.hidden = false;
  root.onkeydown = event => {
    const forOthers = event.altKey || event.ctrlKey || event.metaKey;
    if (!forOthers && event.key !== "Tab" && event.key !== "Escape") event.stopPropagation();
  };
  root.explorable = {spec, render, compute: inputs => compute({...inputs}, spec.data)};   // for tests
}
