// The review: buttons and keys by which a person judges and corrects the chosen landmark.

import { element } from "./element.js";

// Steps to the right, upwards and through the slices.
const STEPS = {
  ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, 1, 0], ArrowDown: [0, -1, 0], PageUp: [0, 0, 1], PageDown: [0, 0, -1],
};
const KEYS = { n: "next", a: "accept", x: "absent", p: "place", h: "heatmap", Escape: "cancel" };
const FINE = 0.1; // of a voxel, of a point
const FAR = 10; // times as far, with Shift

/**
 * Calls `act` with "next", "accept", "absent", "place", "here" (at the crosshair), "heatmap", "cancel", "undo" or
 * "redo", and `onStep` with the index of a landmark that arrow keys have moved.
 */
export function listenForReview(state, act, onStep) {
  for (const button of element("results").querySelectorAll("[data-act]")) {
    button.onclick = () => act(button.dataset.act);
  }
  document.addEventListener("keydown", (event) => {
    if (isField(event.target) || !press(event, act, (...step) => move(state, onStep, ...step))) return;
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
  // In the table, arrows choose another row.
  if (key in STEPS && target.id === "canvas" && !event.ctrlKey && !event.metaKey) {
    return step(STEPS[key].map((one) => one * (event.shiftKey ? FAR : 1)), event.repeat);
  }
  if (element("results").hidden) return false;
  if (event.ctrlKey || event.metaKey) {
    const redo = (key.toLowerCase() === "z" && event.shiftKey) || key.toLowerCase() === "y";
    if (!redo && key.toLowerCase() !== "z") return false;
    act(redo ? "redo" : "undo");
    return true;
  }
  if (key === "Enter" && target.id === "canvas") act("here");
  const name = KEYS[key] ?? KEYS[key.toLowerCase()];
  if (name) act(name);
  return name !== undefined;
}

/** Move the chosen point, or the crosshair where there is none, or through the slices; return whether there is a viewer. */
function move({ queue, viewer, visible }, onStep, steps, on) {
  if (!viewer) return false;
  const { edits, selected } = queue.current ?? {};
  const { ras_mm } = edits?.landmarks[selected] ?? {};
  const along = viewer.along(steps);
  if (!visible || !ras_mm || steps[2]) {
    viewer.walk(along);
    return true;
  }
  const size = FINE * Math.min(...edits.original.volume.spacing_mm);
  edits.place(selected, ras_mm.map((mm, axis) => mm + size * along[axis]), { on });
  onStep(selected);
  return true;
}

const isField = (target) => target.matches("input:not([type=checkbox]), select, textarea");
