// What was chosen last, for when the page is opened again; some browsers let a page remember nothing.

/** What was chosen last; null: nothing. */
export function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // It is as at first next time.
  }
}
