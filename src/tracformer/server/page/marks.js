// Blanks in text: [[8]], [[3-8]], [[]]. The same grammar as tracformer.generation.template, with the position of every mark. Lenient: an error
// goes into `problem`, and the rest is still parsed.

const MARK = /(\\*)(\[\[|\]\])/g;

// Return {pieces, marks, problem}: pieces[0] marks[0] pieces[1] ...; a mark has content, start and stop in the raw text, low, and high (null: free).
export function parse(text) {
  const pieces = [], marks = [];
  let current = "", opened = -1, at = 0, match;
  MARK.lastIndex = 0;
  while ((match = MARK.exec(text))) {
    const [, slashes, bracket] = match;
    current += text.slice(at, match.index) + "\\".repeat(slashes.length >> 1);
    at = MARK.lastIndex;
    if (slashes.length % 2) {
      current += bracket;
    } else if (bracket === "[[" && opened < 0) {
      while (text[at] === "[") { current += "["; at++; } // the last two brackets of several open the blank
      opened = at - 2;
      pieces.push(current);
      current = "";
    } else if (bracket === "]]" && opened >= 0) {
      marks.push({ content: current, start: opened, stop: at, ...lengths(current) });
      opened = -1;
      current = "";
    } else {
      current += bracket;
    }
    MARK.lastIndex = at;
  }
  let problem = marks.find((mark) => mark.problem)?.problem ?? "";
  current += text.slice(at);
  if (opened >= 0) {
    problem = "A blank is opened with [[ and not closed: write ]] after it, or \\[[ for the brackets themselves.";
    current = pieces.pop() + "[[" + current;
  }
  pieces.push(current);
  return { pieces, marks, problem };
}

// Return text with the blanks of other programs, [MASK], <mask> or ____, as [[]]; several in a row are one.
export function adopted(text) {
  return text.replace(/(?:\[MASK\]|<mask>|_{3,})(?:\s*(?:\[MASK\]|<mask>|_{3,}))*/g, "[[]]");
}

// Return the lengths that a blank's content allows.
export function lengths(content) {
  if (content === "") return { low: 1, high: null };
  const match = /^([0-9]{1,9})(?:-([0-9]{1,9}))?$/.exec(content);
  const low = match ? Number(match[1]) : 0;
  const high = match ? Number(match[2] ?? match[1]) : 0;
  if (low < 1 || high < low) {
    const shown = content.length > 24 ? content.slice(0, 23) + "…" : content;
    return { low: 1, high: 1, problem: `A blank holds a number of tokens, not “${shown}”: [[8]], [[3-8]], or [[]] to let the model choose. Score takes it as text to score.` };
  }
  return { low, high };
}

export function contentOf(low, high) {
  if (high === null) return "";
  return low === high ? String(low) : `${low}-${high}`;
}

export function describe(low, high) {
  if (high === null) return "free length";
  return low === high ? `${low} token${low === 1 ? "" : "s"}` : `${low} to ${high} tokens`;
}

// Return the text that `parse` cuts into these pieces and contents: brackets in the pieces are escaped.
export function write(pieces, contents) {
  const opened = contents.map((content, k) => escape(pieces[k], "[") + "[[" + escape(content, "]"));
  return [...opened, escape(pieces.at(-1))].join("]]");
}

// Escape brackets. `before`: the bracket of a blank that follows the text; backslashes at the end are doubled so that they do not escape it.
function escape(text, before = "") {
  const escaped = text.replace(MARK, (_, slashes, bracket) => slashes + slashes + "\\" + bracket);
  if (!before) return escaped;
  const edge = before === "[" ? /(\\*)(\[?)$/.exec(escaped) : /(\\*)(\]?)$/.exec(escaped);
  return escaped.slice(0, edge.index) + edge[1] + edge[1] + edge[2];
}
