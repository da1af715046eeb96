// Notices: how far a scan is, and what went wrong.

import { element } from "./element.js";
import { isPassing, Problem } from "./service.js";

// Shown above the detail of a problem, by its code.
const PROBLEM_TITLES = {
  "not-a-volume": "This file is not a scan that can be read",
  "broken-volume": "This scan is damaged or incomplete",
  "unauthorized": "The service did not accept the key",
  "slow-upload": "The upload took too long",
  "too-large": "This scan is too large for the service",
  "bad-geometry": "The geometry of this scan is unclear",
  "bad-voxels": "The values of this scan cannot be used",
  "queue-full": "The service is busy; please try again soon",
  "not-ready": "The service is not ready yet; please try again soon",
  "draining": "The service is stopping",
  "deadline-exceeded": "The request took too long; please try again later",
  "not-stored": "The service has no room to keep this",
  "does-not-fit": "This scan needs more memory than the service has",
};
const MISFIT = "does not fit this model";
const MISFITS = ["too-large", "bad-geometry"]; // where the detail is about the model
export const CANCELLED = new Problem({ code: "cancelled", title: "Cancelled", detail: "The service was told to stop." });
export const NO_SCAN = new Problem({
  code: "no-scan",
  title: "No scan found",
  detail: "Expected NIfTI (.nii, .nii.gz), NRRD (.nrrd), MetaImage (.mha, .mhd), FreeSurfer (.mgz) or DICOM files.",
});
const LEFT_OUT_NAMES = 3; // a study may have hundreds of other files
// Besides those that are passing.
const RETRYABLE = ["slow-upload", "deadline-exceeded", "broken-off", "unexpected", "cancelled"];

// Titles where a file has several scans, by what is chosen of it.
const CHOICES = { frame: "Several frames: choose one", series: "Several series: choose one" };

/** Say which files are not opened, because they are no scans. */
export function showLeftOut(names) {
  const more = names.length > LEFT_OUT_NAMES ? ` and ${names.length - LEFT_OUT_NAMES} more` : "";
  element("left-out").textContent = names.length ? `Left out: ${names.slice(0, LEFT_OUT_NAMES).join(", ")}${more}.` : "";
}

/** Show the progress of a scan, as the service reports it. */
export function showProgress({ stage, part, ahead, tile, tiles, until }) {
  const bar = element("progress");
  const known = { upload: part, tile: tiles ? tile / tiles : undefined }[stage];
  if (known === undefined) bar.removeAttribute("value");
  else bar.value = known;
  element("stage-name").textContent = {
    waiting: () => "Waiting for its turn",
    upload: () => (part < 1 ? `Sending, ${Math.round(100 * part)} %` : "Sent"),
    queued: () => (ahead ? `Waiting behind ${ahead} other ${ahead === 1 ? "scan" : "scans"}` : "Preparing"),
    tile: () => `Detecting: tile ${tile} of ${tiles}`,
    outage: () => `Trying again at ${until.toLocaleTimeString()}`,
  }[stage]();
}

/** Give the focus, if what has it was hidden, to what is shown in its place. */
export function keepFocus() {
  const { activeElement: focused } = document;
  if (focused.id !== "side" && focused.checkVisibility()) return;
  ["problem", "work", "results", "side"].map(element).find((one) => one.checkVisibility()).focus();
}

/** Whether a problem is that the model is for other scans. */
export const isMisfit = ({ code, message }) => MISFITS.includes(code) && message.includes("the model's");

/** What has to be chosen: "frame" or "series"; undefined: neither. */
const askedOf = ({ message }) => Object.keys(CHOICES).find((name) => message.includes(`choose a ${name}`));

/** What a problem is called in the list of scans. */
export const nameOfProblem = (problem) => CHOICES[askedOf(problem)] ?? (isMisfit(problem) ? MISFIT : problem.title);

/** Ask which frame or series of its file a scan is, where it has several; of one that is answered, which is opened, too. */
export function showChoice({ problem, edits, choice }) {
  // What was chosen may be what is wrong.
  const asked = (problem && askedOf(problem)) ?? Object.keys(choice)[0];
  element("ask-choice").hidden = !asked || !(problem || edits);
  element("choice-words").textContent = edits ? "Another" : "Which";
  element("choice-name").textContent = element("choice").name = asked || "";
  element("choice").value = edits ? choice[asked] + 1 : choice[asked] ?? 0;
}

/** Show a problem of the service, or an error; `isAnswer`: what failed is a scan's answer, which can be asked for again. */
export function showProblem(error, isAnswer = false) {
  if (error.code === "unauthorized") element("ask-key").hidden = false;
  element("problem-title").textContent =
    CHOICES[askedOf(error)] ?? (isMisfit(error) ? `This scan ${MISFIT}` : PROBLEM_TITLES[error.code]) ?? error.title ?? "Unexpected error";
  element("problem-detail").textContent = error.message.replace(/(; |\()(?=series \d+: )/g, "$1\n"); // a line for each
  element("problem-id").textContent = error.requestId ? `Request id ${error.requestId}` : "";
  element("again").hidden = !isAnswer || !(isPassing(error) || RETRYABLE.includes(error.code));
  element("problem").hidden = false;
  // It may lie below a scan that fills the window, or above what was pressed; a point is not moved away from its hand.
  if (document.activeElement.id !== "canvas") element("problem").scrollIntoView({ block: "nearest" });
}
