// Keeping: lets a service that has a store keep the scan that is looked at, with its corrections.

import { element } from "./element.js";
import { keepCase } from "./service.js";

/** Say whether the service stores anything, and offer it if so. */
export function offerToKeep(keeps) {
  element("keeps").textContent = keeps ? ", and stored there only if you press Keep" : ", and not stored";
  element("keeping").hidden = !keeps;
}

/** Keep a scan of the list as it is corrected now; `setStatus` and `onProblem` are told how it goes. */
export async function keep(entry, setStatus, onProblem) {
  if (element("keep").ariaDisabled === "true") return;
  const { file, choice, edits } = entry;
  const { answer, landmarks } = edits;
  element("keep").ariaDisabled = true; // and keeps the focus
  onProblem(null);
  setStatus("Keeping…");
  try {
    const { id } = await keepCase(file, answer, choice);
    edits.saved = landmarks;
    setStatus(`Kept as case ${id}.`);
  } catch (problem) {
    setStatus("");
    if (entry.edits === edits) onProblem(problem); // it may have been asked again
  }
  element("keep").ariaDisabled = false;
}
