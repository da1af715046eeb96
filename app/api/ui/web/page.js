// The page: sends a scan to the service and shows it with its landmarks.

import { Results } from "./results.js";
import { findLandmarks, generateScan, getReadiness, listModels, setKey } from "./service.js";
import { makeViewer } from "./viewer.js";

const PHANTOM = "phantom"; // the model for generated scans
const FIRST_SEED = 6; // a generated scan that lacks one of its structures
const POLL_MS = 1000;
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
  "does-not-fit": "This scan needs more memory than the service has",
};

const RETRYABLE = new Set(["slow-upload", "queue-full", "not-ready", "draining", "deadline-exceeded", "unreachable"]);

const element = (id) => document.getElementById(id);
const setStatus = (text) => (element("state").textContent = text);
const state = {
  file: null, choice: {}, answer: null, abort: null, seed: FIRST_SEED, viewer: null, models: {},
};

const results = new Results({
  onSelect: (index) => select(index, { focus: true }),
  onHover: (index) => state.viewer?.hover(index),
  onProblem: showProblem,
});

function select(index, options) {
  results.select(index, options);
  state.viewer?.select(index);
}

/** Show a file, request its landmarks, and show them. */
async function open(file, choice = {}) {
  state.abort?.abort(new DOMException("another scan", "AbortError"));
  const abort = (state.abort = new AbortController());
  Object.assign(state, { file, choice, answer: null });
  results.hide();
  setStatus("");
  element("problem").hidden = true;
  element("welcome").hidden = element("about").hidden = true;
  element("work").hidden = false;
  const shown = showScan(file);
  try {
    const options = { model: element("model").value, ...choice, signal: abort.signal, onProgress: showProgress };
    const answer = await findLandmarks(file, options);
    const visible = await shown;
    if (abort.signal.aborted) return;
    state.answer = answer;
    results.show(answer, file.name);
    if (visible) {
      state.viewer.setLandmarks(answer.landmarks);
      element("names").checked = state.viewer.names;
    }
    select(answer.landmarks.findIndex(({ ijk }) => ijk));
  } catch (error) {
    if (error.name !== "AbortError") showProblem(error);
    // No scan is shown: show the drop area again.
    if (state.viewer && !(await shown) && state.abort === abort) {
      element("welcome").hidden = !(element("unseen").hidden = true);
    }
  } finally {
    if (state.abort === abort) element("work").hidden = true;
  }
}

/** Show a scan in the viewer; return whether it is shown. */
async function showScan(file) {
  const note = element("unseen");
  await viewing;
  if (!state.viewer) return false;
  try {
    await state.viewer.show(file);
    note.hidden = true;
  } catch (error) {
    note.textContent = error.note ?? "The viewer cannot show this scan.";
    note.hidden = false;
  }
  element("views").hidden = !note.hidden;
  return note.hidden;
}

function showProgress({ stage, part, ahead, tile, tiles }) {
  const bar = element("progress");
  const known = { upload: part, tile: tiles ? tile / tiles : undefined }[stage];
  if (known === undefined) bar.removeAttribute("value");
  else bar.value = known;
  element("stage-name").textContent = {
    upload: () => (part < 1 ? `Sending, ${Math.round(100 * part)} %` : "Sent"),
    queued: () => (ahead ? `Waiting behind ${ahead} other ${ahead === 1 ? "scan" : "scans"}` : "Preparing"),
    tile: () => `Detecting: tile ${tile} of ${tiles}`,
  }[stage]();
}

function showProblem(error) {
  if (error.code === "unauthorized") element("ask-key").hidden = false;
  element("problem-title").textContent = PROBLEM_TITLES[error.code] ?? error.title ?? "Unexpected error";
  element("problem-detail").textContent = error.message;
  element("problem-id").textContent = error.requestId ? `Request id ${error.requestId}` : "";
  const asked = ["frame", "series"].find((name) => error.message.includes(`${name}=`));
  element("ask-choice").hidden = !asked;
  element("choice-name").textContent = element("choice").name = asked ?? "";
  element("again").hidden = !RETRYABLE.has(error.code);
  element("problem").hidden = false;
}

/** Fill the list of models; rejects with `unauthorized` if the service needs a key. */
async function loadModels() {
  const models = (await listModels()).filter(({ landmarks }) => landmarks !== null);
  state.models = Object.fromEntries(models.map((model) => [model.name, model]));
  element("model").replaceChildren(...models.map(({ name }) => new Option(name)));
  element("model").disabled = !models.length;
  element("generate").hidden = !models.some(({ name }) => name === PHANTOM);
  setStatus(models.length ? "" : "This service has no models; see its README.");
  describeModel();
}

/** Describe the selected model where the table of landmarks will be. */
function describeModel() {
  const model = state.models[element("model").value];
  element("about").hidden = !model || state.file !== null;
  if (!model) return;
  element("about-title").textContent = `${model.name} ${model.version}`;
  element("about-text").textContent = `${model.description} It detects ${model.landmarks} landmarks.`;
}

async function start() {
  for (let { ready, reason } = await getReadiness(); !ready; { ready, reason } = await getReadiness()) {
    setStatus(`Waiting for the service: ${reason}`);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
  setStatus("");
  try {
    await loadModels();
  } catch (error) {
    if (error.code !== "unauthorized") return showProblem(error);
    element("ask-key").hidden = false;
    element("key").focus();
  }
}

function listen() {
  const drop = document.documentElement;
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", (event) => event.relatedTarget ?? drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const [file] = event.dataTransfer.files;
    if (file) open(file);
  });
  const choose = () => element("file").click();
  element("choose").onclick = element("welcome").onclick = choose;
  element("file").onchange = ({ target }) => {
    if (target.files[0]) open(target.files[0]);
    target.value = ""; // so that the same file can be chosen again
  };
  element("model").onchange = () => (state.file ? open(state.file, state.choice) : describeModel());
  element("cancel").onclick = () => state.abort?.abort(new DOMException("cancelled", "AbortError"));
  element("again").onclick = () => open(state.file, state.choice);
  element("generate").onclick = generate;
  element("names").onchange = ({ target }) => (state.viewer.names = target.checked);
  element("views").onclick = ({ target }) => target.dataset.view && showView(target.dataset.view);
  element("ask-choice").onsubmit = (event) => {
    event.preventDefault();
    const { name, valueAsNumber } = element("choice");
    open(state.file, { [name]: valueAsNumber });
  };
  element("ask-key").onsubmit = submitKey;
}

async function generate() {
  try {
    const scan = await generateScan(state.seed++);
    element("model").value = PHANTOM;
    await open(scan);
  } catch (error) {
    showProblem(error);
  }
}

async function submitKey(event) {
  event.preventDefault();
  setKey(element("key").value);
  try {
    await loadModels();
    element("ask-key").hidden = element("problem").hidden = true;
    if (state.file) await open(state.file, state.choice);
  } catch (error) {
    showProblem(error);
  }
}

function showView(name) {
  state.viewer.view(name);
  for (const button of element("views").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", button.dataset.view === name);
  }
}

async function loadViewer() {
  const callbacks = { onSelect: (index) => select(index), onHover: (index) => results.hover(index) };
  state.viewer = await makeViewer(element("canvas"), element("labels"), callbacks);
  if (state.viewer) return;
  element("unseen").hidden = false;
  element("unseen").textContent = document.body.dataset.viewer === "present"
    ? "Scans cannot be drawn in this browser, because it has no WebGL 2. Landmarks are listed."
    : "Scans are not drawn, because NiiVue is not installed with the service: pip install 'landmarkd[page]'. Landmarks are listed.";
}

listen();
const viewing = loadViewer();
// For tests and debugging.
window.landmarkd = state;
await Promise.all([viewing, start()]);
document.body.dataset.ready = "";
