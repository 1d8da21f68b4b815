// Two prompts of chapter 01: what the second finds of the first. The twin is `compare`.
({first, second, clock, answer, prices}, {block, prices: lists}) => {
  const decoder = new TextDecoder("utf-8", {ignoreBOM: true});
  const withClock = (text, minute) => {
    const at = clock === "end" ? text.replace(/\n+$/, "").lastIndexOf("\n") + 1 : 0;
    return clock === "none" ? text : `${text.slice(0, at)}It is 09:${minute}.\n${text.slice(at)}`;
  };
  const tokens = text => [null, ...new TextEncoder().encode(text)];
  const one = tokens(withClock(first, 41)), two = tokens(withClock(second, 42));
  const least = Math.min(one.length, two.length);
  let same = 0;
  while (same < least && one[same] === two[same]) same++;
  const hits = Math.floor(Math.min(same, two.length - 1) / block) * block;
  const [hit, miss, out] = lists[prices];
  const full = two.length * miss + answer * out;
  const cost = hits * hit + (two.length - hits) * miss + answer * out;

  const where = same === one.length && same === two.length ? "The two are equal."
    : same === least ? "One is the beginning of the other."
    : `They first differ at byte ${same}.`;

  // a block is cut again where the meaning changes
  const spans = (all, parts) => {
    const found = [];
    let from = 0;
    for (const [end, meaning] of parts)
      while (from < end) {
        const to = Math.min(end, Math.floor(from / block) * block + block);
        const bytes = new Uint8Array(all.slice(from, to).filter(token => token !== null));
        found.push([(from ? "" : "▸") + decoder.decode(bytes), meaning]);
        from = to;
      }
    return found;
  };
  // of a long prompt, its beginning and the blocks around the end of what is remembered
  const gap = [" … ", null];
  const near = all => all.reduce((shown, span, i) => {
    if (i < 6 || Math.abs(i - hits / block) <= 20) shown.push(span);
    else if (shown.at(-1) !== gap) shown.push(gap);
    return shown;
  }, []);
  return {where, hits, misses: two.length - hits, times: full / cost, full, cost,
          first_blocks: near(spans(one, [[hits, "hit"], [one.length, null]])),
          second_blocks: near(spans(two, [[hits, "hit"], [same, "waste"], [two.length, "miss"]]))};
}
