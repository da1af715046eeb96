// The review: buttons and keys by which a person judges and corrects the chosen landmark.

import { element } from "./element.js";

// Steps of the arrow keys, to the right and upwards.
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
const KEYS = { n: "next", a: "accept", x: "absent", p: "place", h: "heatmap", Escape: "cancel" };
const FINE = 0.1; // of a voxel; a whole one with Shift

/**
 * Calls `act` with "next", "accept", "absent", "place", "here" (at the crosshair), "heatmap", "cancel", "undo" or
 * "redo", and `step` with voxels to the right and upwards, and whether a key is held down.
 */
export function listenForReview(act, step) {
  for (const button of element("results").querySelectorAll("[data-act]")) {
    button.onclick = () => act(button.dataset.act);
  }
  document.addEventListener("keydown", (event) => {
    const taken = element("results").hidden || isField(event.target) ? false : press(event, act, step);
    if (!taken) return;
    event.preventDefault();
    event.stopPropagation();
  }, { capture: true });
}

/** Show what can be done. */
export function showReview(edits, placing) {
  const doubtful = edits.landmarks.length - edits.decided;
  element("decided").textContent = edits.decided ? `You have decided ${edits.decided}; ${doubtful} left.` : "";
  element("judge").querySelector('[data-act="undo"]').ariaDisabled = !edits.canUndo;
  element("judge").querySelector('[data-act="redo"]').ariaDisabled = !edits.canRedo;
  element("judge").querySelector('[data-act="place"]').setAttribute("aria-pressed", placing);
  element("placing").hidden = !placing;
}

/** Act on a key; return whether it means anything here. */
function press(event, act, step) {
  const { key, target } = event;
  if (event.altKey) return false;
  if (event.ctrlKey || event.metaKey) {
    const redo = (key.toLowerCase() === "z" && event.shiftKey) || key.toLowerCase() === "y";
    if (!redo && key.toLowerCase() !== "z") return false;
    act(redo ? "redo" : "undo");
    return true;
  }
  // In the table, arrows choose another row.
  if (key in ARROWS && target.id === "canvas") {
    return step(...ARROWS[key].map((one) => one * (event.shiftKey ? 1 : FINE)), event.repeat);
  }
  if (key === "Enter" && target.id === "canvas") act("here");
  const name = KEYS[key] ?? KEYS[key.toLowerCase()];
  if (name) act(name);
  return name !== undefined;
}

const isField = (target) => target.matches("input:not([type=checkbox]), select, textarea");
