// The answers: requests the landmarks of the scans of a list, one after the other.

import { Edits } from "./edits.js";
import { element } from "./element.js";
import { CANCELLED, showProgress } from "./notices.js";
import { findLandmarks, getReadiness, isPassing, persist } from "./service.js";

/** Request the landmarks of those that wait, unless that is being done; `present` is told of each that changes. */
export async function answerWaiting(queue, present) {
  if (queue.working) return;
  queue.working = true;
  for (let entry; (entry = queue.next()); ) {
    await answer(entry, queue, present);
    const { problem } = entry;
    if (problem?.code === "unauthorized") {
      element("ask-key").hidden = false; // whichever scan one looks at
      break;
    }
    if (!problem || !isPassing(problem) || (await getReadiness()).ready) continue;
    queue.fail(problem); // each would wait as long, for nothing
    present(queue.current);
  }
  queue.working = false;
}

async function answer(entry, queue, present) {
  const abort = (entry.abort = new AbortController());
  entry.model ||= element("model").value; // opened before the list of models was there
  entry.state = "working";
  const { signal } = abort;
  const onProgress = (progress) => {
    entry.progress = progress;
    if (entry === queue.current) showProgress(progress);
  };
  const attempt = () => {
    Object.assign(entry, { problem: null, progress: { stage: "upload", part: 0 } });
    present(entry);
    return findLandmarks(entry.file, { model: entry.model, ...entry.choice }, { signal, onProgress });
  };
  const onWait = (problem, until) => {
    Object.assign(entry, { problem, progress: { stage: "outage", until } });
    present(entry);
  };
  let outcome;
  try {
    outcome = { state: "done", edits: new Edits(await persist(attempt, signal, onWait)) };
  } catch (error) {
    const cancelled = error.name === "AbortError";
    outcome = cancelled ? { state: "cancelled", problem: CANCELLED } : { state: "problem", problem: error };
  }
  if (entry.abort !== abort) return; // asked again by now
  Object.assign(entry, outcome);
  present(entry);
}
