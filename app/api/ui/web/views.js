// The buttons above the scan: view, contrast and names; and why it is not shown.

import { element } from "./element.js";

/** Let the buttons change the viewer of the page's state, which is there when they are shown. */
export function listenForViews(state) {
  element("names").onchange = ({ target }) => (state.viewer.names = target.checked);
  element("views").onclick = ({ target: { dataset } }) => {
    if (dataset.window) state.viewer.window(dataset.window);
    if (!dataset.view) return;
    state.viewer.view(dataset.view);
    showPressed("view", dataset.view);
  };
}

/** Show which button of the group "view" or "window" is pressed; null: none, as by hand something else was chosen. */
export function showPressed(group, name) {
  for (const button of element("views").querySelectorAll(`[data-${group}]`)) {
    button.setAttribute("aria-pressed", button.dataset[group] === name);
  }
}

/** Say why a scan is not shown; return whether it is, because there is nothing to say. */
export function explain(why) {
  element("unseen").textContent = why;
  element("unseen").hidden = !why;
  element("views").hidden = element("hint").hidden = Boolean(why);
  return !why;
}
