// What the browser keeps for this page: "localStorage" for good, "sessionStorage" until the tab is closed. A browser may forbid both, and does
// so by an exception on the first touch; the page then forgets.

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
    // it holds until the page is left
  }
}
