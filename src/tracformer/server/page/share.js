// Export a fill: a link with everything in its hash, the body of a request, the clipboard.

import { DEFAULTS } from "./settings.js";

// Return {text, model, run, ...settings} as a hash, without defaults. `run`: fill when the link is opened.
export function toHash(state) {
  const fields = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value !== null && value !== undefined && value !== false && value !== DEFAULTS[name]) fields.set(name, value === true ? "1" : value);
  }
  return "#" + fields;
}

export function fromHash(hash) {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  if (!fields.has("text")) return null;
  const number = (name, least, most) => {
    const value = fields.has(name) ? Number(fields.get(name)) : NaN;
    return Number.isFinite(value) ? Math.min(most, Math.max(least, value)) : DEFAULTS[name];
  };
  return {
    text: fields.get("text"),
    model: fields.get("model"),
    quality: fields.get("quality"),
    mode: fields.get("mode"),
    order: fields.get("order"),
    temperature: number("temperature", 0, 2),
    top_p: number("top_p", 0.05, 1),
    seed: number("seed", 0, 2 ** 53 - 1),
    n: Math.floor(number("n", 1, 16)),
    run: fields.get("run") === "1",
  };
}

// Return the body of a request, without defaults.
export function bodyOf(text, settings) {
  return { text, ...Object.fromEntries(Object.entries(settings).filter(([name, value]) => value !== null && value !== DEFAULTS[name])) };
}

// Copy a text. Where the page may not use the clipboard (plain http from another machine), copy from a temporary text area.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
