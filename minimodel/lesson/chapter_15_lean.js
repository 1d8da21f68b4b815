({weight, sessions, viral}, {weights, loads, runs}) => {
  const byWeight = runs[viral ? "viral" : "quiet"][loads.indexOf(sessions)];
  const row = byWeight[weights.indexOf(weight)];
  const [a, b, c, d] = row.work;
  return {
    hit: row.hit, p50: row.p50, p99: row.p99, a, b, c, d,
    spread: Math.max(a, b, c, d) / 25,
    weights, tails: byWeight.map((run) => run.p99),
  };
}
