// Turn selected words into a blank: which characters it replaces, and how many tokens they are.

import { contentOf, parse } from "./marks.js";

// Return {start, stop, content} of the new blank in the raw text. `count(text, inside)` returns the server's tokens of a text; `inside`: it follows other text.
export async function tokensToBlank(text, [from, to], kind, count) {
  const { marks } = parse(text);
  let [start, stop] = from < to ? trimmed(text, from, to) : wordAt(text, from, kind);
  for (const mark of marks) { // blanks that the selection touches are included whole
    if (mark.start < stop && start < mark.stop) [start, stop] = [Math.min(start, mark.start), Math.max(stop, mark.stop)];
  }
  if (start === stop) return { start, stop, content: kind === "text" ? "4" : "6" };
  const inside = parse(text.slice(start, stop));
  const spaced = kind === "text" && text[start - 1] === " ";
  let low = 0, high = 0;
  for (const [k, piece] of inside.pieces.entries()) {
    const tokens = piece ? await counted((k === 0 && spaced ? " " : "") + piece, kind, count, start > 0 || k > 0) : 0;
    low += tokens + (inside.marks[k]?.low ?? 0);
    high += tokens + (inside.marks[k] ? inside.marks[k].high ?? Infinity : 0);
  }
  return { start, stop, content: contentOf(low, high === Infinity ? null : high) };
}

// Number of tokens; a guess if the server does not answer, which the user can correct by dragging.
async function counted(text, kind, count, inside) {
  if (kind !== "text") return text.length;
  try {
    return Math.max(1, (await count(text, inside)).length);
  } catch {
    return Math.max(1, Math.ceil(text.trim().length / 4));
  }
}

function trimmed(text, from, to) {
  const selected = text.slice(from, to);
  const start = from + selected.length - selected.trimStart().length;
  return [start, Math.max(start, from + selected.trimEnd().length)];
}

function wordAt(text, at, kind) {
  if (kind !== "text") return [at, at];
  const before = /[\p{L}\p{N}'’]*$/u.exec(text.slice(0, at))[0].length;
  const behind = /^[\p{L}\p{N}'’]*/u.exec(text.slice(at))[0].length;
  return [at - before, at + behind];
}
