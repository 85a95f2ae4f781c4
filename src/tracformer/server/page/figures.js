// The numbers below the filled text: log-probability, settings of the fill, and the score of the whole text.

import { byId, element, figure, percent } from "./dom.js";

const WORTH = {
  car: "exact joint",
  ar: "exact joint",
  ac: "exact given the order",
  diffusion: "sum over tokens when each was filled, not the probability of the whole",
};

export function showFigures(run, at) {
  const result = run?.samples[at]?.result;
  const list = byId("figures");
  if (!result) {
    list.replaceChildren();
    return;
  }
  const tokens = result.spans.reduce((sum, span) => sum + span.token_ids.length, 0);
  const lengths = result.length_choice ? result.spans.map((span) => span.token_ids.length).join(", ") : null;
  list.replaceChildren(
    ...entry("log p", figure(result.log_prob), "log-probability of all fills together, given the rest: " + (WORTH[result.mode] ?? result.mode)),
    ...entry("log p per token", figure(result.log_prob / tokens), "log p divided by the number of tokens"),
    ...entry("tokens", String(tokens)),
    ...entry("mode", result.mode.toUpperCase(), WORTH[result.mode]),
    ...entry("seed", String(run.seed), "the same seed and settings give the same fills"),
    ...(lengths ? entry(result.spans.length > 1 ? "lengths" : "length", lengths, chosen(result.length_choice)) : []),
    ...(run.timings?.tokens_per_second ? entry("tokens per second", figure(run.timings.tokens_per_second, 0)) : []),
    ...(result.note ? entry("note", result.note) : []),
  );
}

function entry(name, value, title) {
  return [element("div", { title }, element("dt", {}, name), element("dd", {}, value))];
}

function chosen({ lengths, log_weights, chosen: taken }) {
  const top = Math.max(...log_weights);
  const total = log_weights.reduce((sum, weight) => sum + Math.exp(weight - top), 0);
  const at = lengths.findIndex((each) => each.join() === taken.join());
  return `chosen among ${lengths.length}, with probability ${percent(Math.exp(log_weights[at] - top) / total)}`;
}

// Show a score, or hide it with null. `what` names the part of the text that was scored.
export function showScore(scored, what) {
  const shown = byId("score-figures");
  shown.hidden = scored === null;
  if (scored === null) return;
  shown.textContent = `${what}: log p ${figure(scored.log_prob)}, ${figure(scored.bits_per_byte)} bits per byte, perplexity ${figure(scored.perplexity, 1)} (${scored.mode.toUpperCase()}, ${scored.kind})`;
}
