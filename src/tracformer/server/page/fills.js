// The fills of the current text: immutable values, so that undo can restore any of them.
//
// A run is {samples, fresh, seed, timings}. A sample is {fills, result}, with one fill for each blank of the text. A fill is a list of tokens, with
// null where a position is open, or null while its length is unknown. A token is {id, text, logProb, draft, candidates}.
// `fresh` becomes false when the text is edited: the tokens belong to an earlier text then, and are shown as drafts.

import { write, contentOf } from "./marks.js";

export function begin(n, marks) {
  const fills = marks.map(({ low, high }) => (low === high ? Array(low).fill(null) : null));
  return { samples: Array.from({ length: n }, () => ({ fills, result: null })), fresh: true, seed: null, timings: null };
}

// Return the run after one more event of the stream.
export function hear(run, name, data) {
  if (name === "start") return { ...run, seed: data.seed };
  if (name === "lengths") {
    return change(run, data.sample, (sample) => ({ ...sample, fills: data.lengths.map((length, k) => resized(sample.fills[k], length)) }));
  }
  if (name === "token") {
    return change(run, data.sample, (sample) => ({
      ...sample,
      fills: sample.fills.map((fill, k) => (k === data.blank ? replaced(fill ?? [], data.index, arrived(data)) : fill)),
    }));
  }
  if (name === "result") {
    const samples = data.results.map((result) => ({ result, fills: result.spans.map(tokensOf) }));
    return { ...run, samples, seed: data.seed, timings: data.timings };
  }
  return run;
}

const change = (run, at, f) => ({ ...run, samples: run.samples.map((sample, i) => (i === at ? f(sample) : sample)) });
const resized = (fill, length) => (fill?.length === length ? fill : Array(length).fill(null));

function replaced(fill, index, token) {
  const copy = fill.slice();
  while (copy.length <= index) copy.push(null);
  copy[index] = token;
  return copy;
}

const arrived = (data) => ({ id: data.token_id, text: data.token, logProb: data.log_prob, draft: data.draft, candidates: data.candidates ?? [] });

// Return the tokens of a finished span. A character of several tokens is shown in the first of them.
function tokensOf(span) {
  const broken = (text) => text.includes("\ufffd");
  const texts = span.tokens.slice();
  let at = 0;
  for (let i = 0; i < texts.length; i++) {
    if (!broken(texts[i])) { at += texts[i].length; continue; }
    let next = i;
    while (next < texts.length && broken(span.tokens[next])) next++;
    const found = next < texts.length ? span.text.indexOf(texts[next], at) : span.text.length;
    const stop = found < 0 ? at : found;
    texts.fill("", i, next);
    texts[i] = span.text.slice(at, stop);
    at = stop;
    i = next - 1;
  }
  return texts.map((text, i) => ({ id: span.token_ids[i], text, logProb: span.log_probs[i], draft: false, candidates: span.candidates?.[i] ?? [] }));
}

export const isComplete = (fill) => fill !== null && fill.length > 0 && fill.every((token) => token !== null && !token.draft);
export const hasTokens = (sample) => sample.fills.some((fill) => fill?.some(Boolean));
export const textOf = (fill) => fill.map((token) => token?.text ?? "").join("");

// Return the run after an edit of the text: fills of blanks that the edit did not touch stay, as drafts. Blanks are matched by their
// distance from the start or the end of the text.
export function carried(run, before, after, oldText, newText) {
  if (!run) return null;
  const shorter = Math.min(oldText.length, newText.length);
  let head = 0, tail = 0;
  while (head < shorter && oldText[head] === newText[head]) head++;
  while (tail < shorter - head && oldText.at(-1 - tail) === newText.at(-1 - tail)) tail++;
  const source = after.marks.map((mark) => {
    if (mark.stop <= head) return before.marks.findIndex((old) => old.start === mark.start && old.stop === mark.stop);
    if (newText.length - mark.start <= tail) {
      return before.marks.findIndex((old) => oldText.length - old.start === newText.length - mark.start && oldText.length - old.stop === newText.length - mark.stop);
    }
    return -1;
  });
  if (source.every((k) => k < 0)) return null;
  const samples = run.samples.map(({ fills }) => ({ result: null, fills: source.map((k, i) => (k < 0 ? open(after.marks[i]) : fills[k])) }));
  return { ...run, samples, fresh: false, timings: null };
}

const open = ({ low, high }) => (low === high ? Array(low).fill(null) : null);

// Turn a filled blank into given text; return the new {text, run}. `moves`: the space before a blank belongs to its first token.
export function lockBlank(parsed, run, at, blank, moves) {
  const { fills } = run.samples[at];
  const filled = textOf(fills[blank]);
  const pieces = parsed.pieces.slice();
  pieces.splice(blank, 2, joined(pieces[blank], filled, moves) + pieces[blank + 1]);
  const contents = parsed.marks.map((mark) => mark.content).toSpliced(blank, 1);
  return locked(pieces, contents, run, fills.toSpliced(blank, 1));
}

// Turn one token into given text, spelled `text`; the tokens before and after it in its blank become two blanks of the same length.
export function lockToken(parsed, run, at, blank, index, text, moves) {
  const { fills } = run.samples[at];
  const before = fills[blank].slice(0, index), behind = fills[blank].slice(index + 1);
  const pieces = parsed.pieces.slice(), contents = parsed.marks.map((mark) => mark.content);
  const parts = [before, behind].filter((part) => part.length);
  let middle = before.length ? text : joined(pieces[blank], text, moves);
  if (!behind.length) middle += pieces[blank + 1];
  pieces.splice(blank, 2, ...(before.length ? [pieces[blank]] : []), middle, ...(behind.length ? [pieces[blank + 1]] : []));
  contents.splice(blank, 1, ...parts.map((part) => contentOf(part.length, part.length)));
  return locked(pieces, contents, run, fills.toSpliced(blank, 1, ...parts));
}

function locked(pieces, contents, run, fills) {
  const rest = fills.length ? { ...run, samples: [{ result: null, fills }], fresh: false, timings: null } : null;
  return { text: write(pieces, contents), run: rest };
}

const joined = (piece, filled, moves) => (moves && piece.endsWith(" ") && filled.startsWith(" ") ? piece + filled.slice(1) : piece + filled);

// Return the whole text with a sample's fills.
export function completed(parsed, fills, moves) {
  return parsed.pieces.reduce((text, piece, k) => joined(text, textOf(fills[k - 1] ?? []), moves) + piece);
}
