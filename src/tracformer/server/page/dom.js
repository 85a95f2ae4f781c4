// Small helpers for building and placing elements.

export const byId = (id) => document.getElementById(id);

// Make an element, as in element("button", {class: "plain", onclick: f}, "text", child); null, undefined and false are left out.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter(Boolean));
  return made;
}

// Make an icon from a symbol in index.html.
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

export const NARROW = "(max-width: 40rem)";

// Place a floating box below its owner, or above it if there is no room; on narrow screens CSS places it.
export function place(box, rect) {
  if (matchMedia(NARROW).matches) {
    box.style.left = box.style.top = "";
    return;
  }
  const { width, height } = box.getBoundingClientRect();
  const below = rect.bottom + 6, above = rect.top - height - 6;
  const room = document.documentElement;
  box.style.left = `${Math.max(8, Math.min(rect.left, room.clientWidth - width - 8))}px`;
  box.style.top = `${below + height > room.clientHeight && above > 0 ? above : below}px`;
}

// Make white space visible in a short text.
export const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");

export const percent = (p) => (p >= 0.9995 ? "100 %" : p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : p >= 0.001 ? `${(100 * p).toFixed(1)} %` : "< 0.1 %");

// Format a number with a real minus sign.
export const figure = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
