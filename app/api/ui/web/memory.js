// What was chosen last, for when the page is opened again; some browsers let a page remember nothing.

/** What was chosen last, in this tab or else in any; null: nothing. */
export function remembered(name) {
  try {
    return sessionStorage.getItem(name) || localStorage.getItem(name);
  } catch {
    return null;
  }
}

/** Remember what somebody chose, or what this tab shows without, which changes nothing in others. */
export function remember(name, value, isChosen = true) {
  try {
    sessionStorage.setItem(name, value);
    if (isChosen) localStorage.setItem(name, value);
  } catch {
    // It is as at first next time.
  }
}
