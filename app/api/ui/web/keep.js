// Keeping: lets a service that has a store keep the scan that is looked at, with its corrections.

import { showProblem } from "./notices.js";
import { keepCase } from "./service.js";

const element = (id) => document.getElementById(id);

/** Say whether the service stores anything, and offer it if so. */
export function offerToKeep(keeps) {
  element("keeps").textContent = keeps ? ", and stored there only if you press Keep" : ", and not stored";
  element("keeping").hidden = !keeps;
}

/** Keep a scan of the list as it is corrected now; `setStatus` is told how it goes. */
export async function keep({ file, choice, edits }, setStatus) {
  const { answer, landmarks } = edits;
  element("keep").disabled = true;
  element("problem").hidden = true;
  setStatus("Keeping…");
  try {
    const { id } = await keepCase(file, answer, choice);
    edits.saved = landmarks;
    setStatus(`Kept as case ${id}.`);
  } catch (problem) {
    setStatus("");
    showProblem(problem);
  }
  element("keep").disabled = false;
}
