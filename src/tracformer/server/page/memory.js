// Values that the browser stores for this page: "localStorage" for good, "sessionStorage" until the tab is closed. A browser may forbid both by
// an exception; nothing is stored then.

export function recall(where, name) {
  try {
    return window[where].getItem(name);
  } catch {
    return null;
  }
}

export function keep(where, name, value) {
  try {
    window[where].setItem(name, value);
  } catch {
    // not stored: the value lasts until the page is closed
  }
}
