// The page: sends scans to the service, shows them with their landmarks, and lets a person correct these.

import { describeModel } from "./about.js";
import { answerWaiting } from "./answers.js";
import { offerDownloads, saveLandmarks, saveMeasurements } from "./downloads.js";
import { nearestToAll } from "./edits.js";
import { element } from "./element.js";
import { listenForFiles } from "./files.js";
import { Heatmap } from "./heatmap.js";
import { keep, offerToKeep } from "./keep.js";
import { remember, remembered } from "./memory.js";
import { CANCELLED, isMisfit, keepFocus, NO_SCAN, showChoice, showLeftOut, showProblem, showProgress } from "./notices.js";
import { listenForPrint } from "./paper.js";
import { Queue, titleOf } from "./queue.js";
import { Results } from "./results.js";
import { listenForReview, showReview } from "./review.js";
import { convertAnswer, generateScan, getReadiness, isPassing, listModels, POLL_MS, setKey } from "./service.js";
import { makeViewer } from "./viewer.js";
import { explain, listenForViews, showPressed } from "./views.js";

const PHANTOM = "phantom"; // the model for generated scans
const FIRST_SEED = 6; // a generated scan that lacks one of its structures
const MODEL_KEY = "landmarkd.model";
const DRAWING = "Drawing the scan…";
const UNSEEN = "The viewer cannot show this scan.";
const REST_MS = 300; // after a correction, until measurements are computed again
const setStatus = (text) => (element("state").textContent = text);
const queue = new Queue((entry) => entry !== queue.current && look(entry));
const state = { queue, seed: FIRST_SEED, viewer: null, models: {}, shown: Promise.resolve(false), placing: false, generating: false };
const heatmap = new Heatmap();
const results = new Results({
  onSelect: (index) => select(index, { focus: true }),
  onHover: (index) => state.viewer?.hover(index),
});

/** Open scans, not `others`: look at the first one, and request the landmarks of all, one after the other. */
function open(files, others = [], model = chosenModel(), choice = {}) {
  showLeftOut(others);
  if (!files.length) return showProblem(NO_SCAN);
  look(queue.add(files, model, choice));
  work();
}

/** The model that people chose, which is not that of a generated scan; "" before there are any. */
const chosenModel = () => element("model").value && (remembered(MODEL_KEY) ?? element("model").value);

/** The model for generated scans, whose folder's name may have its version; undefined: there is none. */
const phantomModel = () => Object.keys(state.models).find((name) => name.split("@")[0] === PHANTOM);

/** Look at a scan of the list. */
function look(entry) {
  queue.current = entry;
  setPlacing(false);
  setStatus("");
  results.hide();
  state.visible = false;
  state.viewer?.clear();
  heatmap.forget(state.viewer);
  if (entry.model) element("model").value = entry.model;
  element("welcome").hidden = element("about").hidden = true;
  if (state.viewer) element("unseen").hidden = true; // what it says is of the scan before
  state.settle?.(false);
  const isRead = new Promise((resolve) => (state.settle = resolve));
  // One at a time: NiiVue does not load two scans at once.
  state.shown = state.shown.then(() => entry === queue.current && showScan(entry, isRead));
  present(entry);
  queue.reveal();
}

/** Request the landmarks of those that wait. */
async function work() {
  await starting; // what is opened before the list of models is there is for the model chosen then
  answerWaiting(queue, present);
}

/** Ask again for the landmarks of scans. */
function again(entries, changes) {
  for (const { abort } of entries) abort?.abort(new DOMException("asked again", "AbortError"));
  queue.again(entries, changes);
  if (entries.includes(queue.current)) look(queue.current);
  work();
}

/** Show how far a scan is, if it is the one looked at. */
async function present(entry) {
  queue.render();
  if (entry !== queue.current) return;
  const isOpen = ["waiting", "working"].includes(entry.state);
  if (!isOpen) state.settle(Boolean(entry.edits) || isMisfit(entry.problem));
  element("work").hidden = !isOpen;
  element("problem").hidden = !entry.problem;
  showChoice(entry);
  if (entry.state === "waiting") showProgress({ stage: "waiting" });
  if (entry.state === "working" && entry.progress) showProgress(entry.progress);
  // Asked again, an answer would lose its corrections.
  if (entry.problem) showProblem(entry.problem, !entry.edits);
  keepFocus();
  const now = entry.state;
  const isNew = entry.edits && element("results").hidden;
  if (isNew) setStatus(DRAWING); // over a slow line, the viewer may still be loaded
  const { shown } = state;
  const visible = await shown;
  if (shown !== state.shown || entry.state !== now) return; // looked at anew, it or another
  if (isNew) setStatus("");
  if (entry.edits) return isNew && showAnswer(entry, visible); // anew, the table would lose the focus
  // No scan is shown: show the drop area again.
  if (entry.problem && now !== "working" && state.viewer && !visible) element("welcome").hidden = !(element("unseen").hidden = true);
}

function showAnswer(entry, visible) {
  const { edits } = entry;
  const title = titleOf(entry.file.name, entry.choice);
  entry.selected ??= nearestToAll(edits.landmarks);
  results.show(edits.answer, title);
  offerDownloads(title, edits, (problem) => entry.edits === edits && showAt(entry, problem, "not downloaded"));
  state.visible = visible;
  if (visible) {
    state.viewer.setGeometry(edits.original.volume);
    state.viewer.setLandmarks(edits.landmarks);
    element("names").checked = state.viewer.names;
  }
  showReview(edits, state.placing);
  select(entry.selected);
  keepFocus();
  if (edits.decided) measureSoon(entry);
}

function select(index, options) {
  const { edits } = queue.current;
  queue.current.selected = index;
  heatmap.hide(state.viewer, index);
  results.select(index, options);
  if (state.visible) state.viewer.select(index, edits.landmarks[index]?.expected_ras_mm);
}

/** Show a problem, or null, at its own scan, and in the list what was not done with that. */
function showAt(entry, problem, undone) {
  entry.problem = problem && Object.assign(problem, { undone });
  queue.render();
  if (entry !== queue.current) return;
  element("problem").hidden = !problem;
  if (problem) showProblem(problem);
}

/** Show what a correction has changed. */
function showEdit(index) {
  const entry = queue.current;
  const { edits } = entry;
  setStatus(""); // what was kept, or was not, is not this
  entry.problem = null;
  results.update(edits.landmarks);
  if (state.visible) state.viewer.setLandmarks(edits.landmarks);
  showReview(edits, state.placing);
  queue.render();
  select(index);
  measureSoon(entry);
}

/** Do what a button or a key of the review says. */
function act(name) {
  const { edits, selected } = queue.current;
  if (name === "next") {
    const next = edits.nextDoubtful(queue.current.reviewed ? selected : -1);
    queue.current.reviewed = true;
    setStatus(next < 0 ? "You have decided all landmarks." : "");
    if (next >= 0) select(next);
  } else if (["place", "heatmap"].includes(name) && !state.visible) {
    setStatus("That takes the scan, which is not shown here.");
  } else if (name === "place") {
    setPlacing(!state.placing);
  } else if (name === "heatmap") {
    heatmap.toggle(queue.current, state.viewer);
  } else if (name === "here") {
    if (state.placing) placeChosen(state.viewer.crosshair);
  } else if (name === "cancel") {
    state.viewer?.cancel();
    setPlacing(false);
  } else {
    const steps = { accept: () => edits.accept(selected), absent: () => edits.remove(selected) };
    const index = steps[name] ? (selected < 0 ? -1 : steps[name]()) : edits[name]();
    if (index >= 0) showEdit(index);
  }
}

function placeChosen(mm) {
  const { edits, selected } = queue.current;
  edits.place(selected, mm);
  setPlacing(false);
  showEdit(selected);
}

/** Let the next click in a plane place the chosen landmark, or let it not. */
function setPlacing(placing) {
  const edits = queue.current?.edits;
  state.placing = Boolean(placing && state.visible && edits?.landmarks[queue.current.selected]);
  if (state.viewer) state.viewer.placing = state.placing;
  if (state.placing) element("canvas").focus({ preventScroll: true });
  if (edits) showReview(edits, state.placing);
}

/** Let the service compute what depends on corrected positions. */
function measureSoon(entry) {
  const { edits } = entry;
  clearTimeout(state.timer);
  if (!edits.original.measurements.length) return;
  results.measured(null);
  element("problem").hidden = !entry.problem;
  state.timer = setTimeout(async () => {
    const { landmarks, original } = edits;
    const isShown = () => entry === queue.current && landmarks === entry.edits?.landmarks; // of this model
    try {
      const answer = await convertAnswer(edits.answer, "json", "json");
      if (isShown()) results.measured(answer);
    } catch (problem) {
      if (!isShown()) return; // measured again when it is looked at
      showProblem(problem);
      // Those of before are of other positions.
      const unknown = { value: null, interval95: null, reason: "not computed" };
      results.measured({ ...original, measurements: original.measurements.map((one) => ({ ...one, ...unknown })) });
    }
  }, REST_MS);
}

/** Show a scan in the viewer, as `Viewer.show`; return whether it is shown. */
async function showScan(entry, isRead) {
  await viewing;
  if (!state.viewer) return false;
  try {
    await state.viewer.show(entry, isRead);
    state.viewer.window("auto");
    return explain("");
  } catch (error) {
    return error.name !== "AbortError" && explain(error.note ?? UNSEEN);
  }
}

/** Fill the list of models; rejects with `unauthorized` if the service needs a key. */
async function loadModels() {
  const { models: all, keeps_cases } = await listModels();
  const models = all.filter(({ landmarks }) => landmarks !== null);
  offerToKeep(keeps_cases);
  state.models = Object.fromEntries(models.map((model) => [model.name, model]));
  // Chosen before a key was asked for again, or before the page was opened again.
  const value = element("model").value || remembered(MODEL_KEY);
  element("model").replaceChildren(...models.map(({ name }) => new Option(name, name, false, name === value)));
  remember(MODEL_KEY, element("model").value, false);
  element("model").disabled = !models.length;
  element("generate").hidden = !phantomModel();
  setStatus(models.length ? "" : "This service has no models; see its README.");
  showModel();
}

function showModel() {
  const model = state.models[element("model").value];
  element("about").hidden = !model || queue.current !== null;
  if (model) describeModel(model);
}

/** Let another model answer all scans. */
function changeModel() {
  const model = element("model").value;
  remember(MODEL_KEY, model);
  if (queue.current) again(queue.entries, { model });
  else showModel();
}

async function start() {
  for (let why; (why = await whyNotStarted()); await new Promise((resolve) => setTimeout(resolve, POLL_MS))) {
    setStatus(`Waiting for the service: ${why}`);
  }
}

/** Load the models, or ask for a key; return why that has to wait, "" if it has not. */
async function whyNotStarted() {
  const { ready, reason } = await getReadiness();
  if (!ready) return reason;
  try {
    await loadModels();
  } catch (error) {
    if (error.code !== "unauthorized") return error.message; // without models, no scan is answered
    setStatus("");
    element("ask-key").hidden = false;
    element("key").focus();
  }
  return "";
}

function listen() {
  listenForFiles(open);
  listenForPrint(element("screen"));
  element("generate").onclick = generate;
  listenForReview(state, act, showEdit);
  listenForViews(state);
  element("model").onchange = changeModel;
  element("cancel").onclick = () => {
    const { current } = queue;
    if (current.abort) current.abort.abort(new DOMException("cancelled", "AbortError"));
    else Object.assign(current, { state: "cancelled", problem: CANCELLED });
    present(current);
  };
  element("again").onclick = () => {
    const failed = queue.entries.filter(({ state, problem }) => state === "problem" && isPassing(problem));
    again([...new Set([queue.current, ...failed])]);
  };
  element("keep").onclick = () => {
    const { current } = queue;
    const onProblem = (problem) => showAt(current, problem, "not kept");
    keep(current, (text) => current === queue.current && setStatus(text), onProblem);
  };
  element("save-all").onclick = () => {
    for (const { edits } of queue.answered) edits.saved = edits.landmarks;
    saveLandmarks(queue.entries);
  };
  element("measure-all").onclick = () => saveMeasurements(queue.entries).catch(showProblem);
  element("ask-choice").onsubmit = (event) => {
    event.preventDefault();
    const { name, valueAsNumber } = element("choice");
    const [{ current }, choice] = [queue, { [name]: valueAsNumber }];
    if (current.edits) open([current.file], [], current.model, choice); // beside it, with its corrections
    else again([current], { choice });
  };
  element("ask-key").onsubmit = submitKey;
  window.addEventListener("beforeunload", (event) => {
    if (queue.isUnsaved) event.preventDefault();
  });
}

async function generate() {
  if (state.generating) return; // a second click would give another scan
  state.generating = true;
  setStatus("Generating a scan…"); // over a slow line, it takes a while
  try {
    open([await generateScan(state.seed)], [], phantomModel());
    state.seed++;
  } catch (error) {
    setStatus("");
    showProblem(error);
  }
  state.generating = false;
}

async function submitKey(event) {
  event.preventDefault();
  setKey(element("key").value);
  try {
    await loadModels();
    element("ask-key").hidden = element("problem").hidden = true;
    const refused = queue.entries.filter(({ problem }) => problem?.code === "unauthorized");
    for (const entry of refused) entry.problem = null;
    again(refused.filter(({ edits }) => !edits)); // the others are only not kept
    keepFocus();
    if (queue.current?.edits?.decided) measureSoon(queue.current); // what the key before was refused
  } catch (error) {
    showProblem(error);
  }
}

async function loadViewer() {
  const callbacks = {
    onSelect: (index) => select(index),
    onHover: (index) => results.hover(index),
    onMove: (index, mm) => {
      queue.current.edits.place(index, mm);
      showEdit(index);
    },
    onPlace: placeChosen,
    onWindow: (name) => showPressed("window", name),
    onGraphics: (draws) => (element("lost").hidden = draws),
  };
  let reason = document.body.dataset.viewer === "present"
    ? "Scans cannot be drawn in this browser, because it has no WebGL 2."
    : "Scans are not drawn, because NiiVue is not installed with the service: pip install 'landmarkd[page]'.";
  try {
    state.viewer = await makeViewer(element("canvas"), element("labels"), callbacks);
  } catch {
    // Such as over a line that breaks meanwhile. Answers need no viewer.
    reason = "Scans are not drawn, because the viewer could not be loaded; reload the page to try again.";
  }
  element("judge").querySelector('[data-act="place"]').hidden = !state.viewer;
  if (!state.viewer) explain(`${reason} Landmarks are listed.`);
}

listen();
const [viewing, starting] = [loadViewer(), start()];
// For tests and debugging.
window.landmarkd = state;
await Promise.all([viewing, starting]);
document.body.dataset.ready = "";
