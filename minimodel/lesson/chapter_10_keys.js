// Two prompts in blocks: which of the second's blocks are found, and every block's key.
// Twin of chapter_10.py's `two_prompts`; the keys are those of cache/keys.py, to the last bit.
({first, second, size, tenant}, {fingerprint, seed, start}) => {
  // --- sha256 (FIPS 180-4), of bytes, to bytes --------------------------------------------
  const primes = [];
  for (let n = 2; primes.length < 64; n++) if (primes.every(p => n % p)) primes.push(n);
  // the first 32 bits of a root's fraction: exact, since a double holds them with room to spare
  const fraction = x => Math.floor((x - Math.floor(x)) * 2 ** 32) | 0;
  const K = primes.map(p => fraction(Math.cbrt(p)));
  const turn = (x, n) => x >>> n | x << 32 - n;
  const compress = (state, block) => {
    const w = [];
    for (let i = 0; i < 64; i++) {
      w[i] = i < 16 ? block.getInt32(4 * i)
        : (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >>> 10) + w[i - 7]
          + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >>> 3) + w[i - 16] | 0;
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const one = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + (e & f ^ ~e & g) + K[i] + w[i] | 0;
      const two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + (a & b ^ a & c ^ b & c) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, d + one | 0, c, b, a, one + two | 0];
    }
    return [a, b, c, d, e, f, g, h].map((x, i) => x + state[i] | 0);
  };
  const sha256 = bytes => {
    const padded = new Uint8Array(Math.ceil((bytes.length + 9) / 64) * 64);
    padded.set(bytes);
    padded[bytes.length] = 0x80;
    new DataView(padded.buffer).setUint32(padded.length - 4, 8 * bytes.length);
    let state = primes.slice(0, 8).map(p => fraction(Math.sqrt(p)));
    for (let at = 0; at < padded.length; at += 64)
      state = compress(state, new DataView(padded.buffer, at, 64));
    const digest = new DataView(new ArrayBuffer(32));
    state.forEach((word, i) => digest.setInt32(4 * i, word));
    return new Uint8Array(digest.buffer);
  };
  // --- keys, as in cache/keys.py -----------------------------------------------------------
  const utf8 = text => [...new TextEncoder().encode(text)];
  const hex = bytes => [...bytes].map(byte => byte.toString(16).padStart(2, "0")).join("");
  const unhex = digits => digits.match(/../g).map(pair => parseInt(pair, 16));
  const little = (number, width) =>
    Array.from({length: width}, (_, i) => Math.floor(number / 2 ** (8 * i)) % 256);
  const root = salt => sha256(
    Uint8Array.from([...utf8(seed), ...unhex(fingerprint), ...little(salt.length, 8), ...salt]));
  const chain = (salt, tokens) => {
    const keys = [];
    let key = root(salt);
    for (let at = 0; at + size <= tokens.length; at += size) {
      const words = tokens.slice(at, at + size).flatMap(token => little(token, 4));
      keys.push(hex(key = sha256(Uint8Array.from([...key, ...words]))));
    }
    return keys;
  };
  // --- what is found ------------------------------------------------------------------------
  const tokens = [first, second].map(text => [start, ...utf8(text)]);
  const salts = [utf8("Ada"), utf8(tenant)];
  const keys = tokens.map((all, i) => chain(salts[i], all));
  const total = tokens[1].length, most = Math.floor((total - 1) / size);
  const known = new Set(keys[0]);
  let same = 0, found = 0, alike = 0;
  while (same < keys[1].length && known.has(keys[1][same])) same++;
  found = Math.min(same, most);
  while (alike < Math.min(tokens[0].length, total) && tokens[0][alike] === tokens[1][alike]) alike++;
  const meaning = i => i < found ? "hit" : i < same ? "notes" : i < keys[1].length ? "miss" : null;
  const decoder = new TextDecoder("utf-8", {ignoreBOM: true});
  const words = part => (part[0] === start ? "▸" : "")
    + decoder.decode(Uint8Array.from(part.filter(token => token !== start)));
  const cut = all => {
    const parts = [];
    for (let at = 0; at < all.length; at += size) parts.push(words(all.slice(at, at + size)).replaceAll("\n", "↵"));
    return parts;
  };
  const short = key => key.slice(0, 6);
  const roots = salts.map(salt => [short(hex(root(salt))), null]);
  const full = keys[0].length;
  return {
    first_blocks: cut(tokens[0]).map((text, i) => [text, i < full ? "notes" : null]),
    first_keys: [roots[0], ...keys[0].map(key => [short(key), "notes"])],
    second_blocks: cut(tokens[1]).map((text, i) => [text, meaning(i)]),
    second_keys: [roots[1], ...keys[1].map((key, i) => [short(key), meaning(i)])],
    total, alike, found, found_tokens: found * size, computed: total - found * size,
  };
}
