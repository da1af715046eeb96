// Calls of the service. None leaves the page's own origin.

// Between attempts, in s, as the Python client waits.
const WAITS_S = [1, 2, 4, 8, 16, 32, 60];
const PATIENCE_MS = 10_000; // for a picture
const LONGEST_MS = 2 ** 31 - 1; // that a timer takes
export const POLL_MS = 1000; // between looks whether a service is ready
const READINESS_MS = 5000; // for a service, or a proxy before it, to say whether it is ready
const PASSING = [429, 502, 503]; // statuses of a service that is busy or restarting, or of a proxy before it

let key = "";

/** Set the key of all calls; return it as a header has it. */
export function setKey(value) {
  // Headers hold bytes: those of UTF-8, as other clients send them.
  return (key = String.fromCharCode(...new TextEncoder().encode(value)));
}

function headers(more = {}) {
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

/** A problem (problem+json) of the service, or an error in its place. */
export class Problem extends Error {
  constructor({ code, status = 0, title, detail, request_id = "" }, retryAfter = 0) {
    super(detail);
    Object.assign(this, { code, status, title, detail, requestId: request_id, retryAfter });
  }
}

/** Whether what failed may succeed later, as it is. */
export const isPassing = ({ code, status }) => ["unreachable", "cut-off"].includes(code) || PASSING.includes(status);

/**
 * Try until it succeeds, for some minutes; whatever is not passing is final. `onWait` gets the problem and the time of
 * the next attempt, which is made sooner where a service that was away is back.
 */
export async function persist(attempt, signal, onWait) {
  let broken = 0;
  for (const wait of WAITS_S) {
    // A proxy takes scans for a service that is away, too, and then closes the connection.
    const { ready } = broken ? await getReadiness(signal) : { ready: true };
    signal.throwIfAborted();
    try {
      return await attempt();
    } catch (problem) {
      signal.throwIfAborted();
      // Twice may not be by chance: the scan may be what ends the service.
      if (!isPassing(problem) && (problem.code !== "broken-off" || (ready && broken++))) throw problem;
      const ms = Math.min(1000 * Math.max(wait, problem.retryAfter), LONGEST_MS);
      onWait(problem, new Date(Date.now() + ms));
      await pause(ms, signal);
    }
  }
  return attempt();
}

/** Wait for so long, or until a service that was not ready is. */
async function pause(ms, signal) {
  let over = false;
  const end = new Promise((resolve, reject) => {
    setTimeout(resolve, ms);
    signal.addEventListener("abort", () => reject(signal.reason));
  });
  const back = async () => {
    for (let away = false, ready; !over && !(ready && away); away ||= !ready) {
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      ({ ready } = await getReadiness());
    }
  };
  await Promise.race([end, back()]).finally(() => (over = true));
}

// Titles and details of what the page itself finds out, by code.
const FOUND_OUT = {
  "unreachable": [
    "No answer",
    "The connection to the service was closed. The service may have stopped, or refused the upload.",
  ],
  "broken-off": [
    "No answer",
    "The connection was closed while the service worked on this scan. The service may have stopped.",
  ],
  "cut-off": ["Answer cut off", "The connection was closed before the whole answer had arrived. Please try again."],
  "unreadable": ["File not readable", "It was changed, moved or removed after it was opened. Please open it again."],
};

function foundOut(code) {
  const [title, detail] = FOUND_OUT[code];
  return new Problem({ code, title, detail });
}

/** Whether a file is still as it was when it was opened; browsers do not read it otherwise. */
export async function isReadable(file) {
  try {
    // Not a part of it, which of a file that is gone is empty.
    const reader = file.stream().getReader();
    await reader.read();
    await reader.cancel();
    return true;
  } catch {
    return false;
  }
}

function problemOf(text, status, after) {
  const retryAfter = Number(after) || 0; // a date instead of seconds counts as none
  try {
    const problem = JSON.parse(text);
    if (problem.code && problem.detail) return new Problem(problem, retryAfter);
  } catch {
    // Such as the HTML of a proxy; its JSON may have a code, too.
  }
  const words = { title: "Unexpected answer", detail: `Got HTTP status ${status}, not from the service itself: perhaps from a proxy in front of it.` };
  return new Problem({ code: "unexpected", status, ...words }, retryAfter);
}

/** Call the service, and read its answer as `form`; `file` is what the body has of the user's disk. */
async function request(form, path, options = {}, file = null) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch {
    throw foundOut(file && !(await isReadable(file)) ? "unreadable" : "unreachable");
  }
  // No call answers HTML, but a proxy may, such as a form to log in.
  const isPage = response.headers.get("Content-Type")?.startsWith("text/html");
  const read = (as) => response[as]().catch(() => { throw foundOut("cut-off"); });
  if (response.ok && !isPage && form === "blob") return read("blob");
  // Not as JSON, which fails alike where it is cut off and where it is whole but none.
  const text = await read("text");
  try {
    if (response.ok) return JSON.parse(text);
  } catch {
    // Such as the text of a proxy.
  }
  throw problemOf(text, response.status, response.headers.get("Retry-After"));
}

export async function getReadiness(signal) {
  const signals = [AbortSignal.timeout(READINESS_MS), signal].filter(Boolean);
  const unknown = { ready: false, reason: "no answer" };
  // 503 has the same body as 200; that of a proxy may be JSON without a reason.
  try {
    return { ...unknown, ...(await (await fetch("readyz", { headers: headers(), signal: AbortSignal.any(signals) })).json()) };
  } catch {
    return unknown;
  }
}

/** All models, and whether the service keeps cases: {models, keeps_cases}. */
export async function listModels() {
  return request("json", "v1/models");
}

/** All calls, as OpenAPI describes them. */
export async function describeCalls() {
  return request("json", "openapi.json");
}

export async function getModel(name) {
  return request("json", `v1/models/${encodeURIComponent(name)}`);
}

export async function generateScan(seed) {
  return new File([await request("blob", `page/phantom.nii.gz?seed=${seed}`)], `phantom-${seed}.nii.gz`);
}

/** Convert an answer to another format, without sending its scan again; read it as "blob" or "json". */
export async function convertAnswer(answer, format, form = "blob") {
  const options = { method: "POST", body: JSON.stringify(answer) };
  return request(form, `page/landmarks?format=${encodeURIComponent(format)}`, options);
}

/** Have a file made of a scan; `query` has its frame or series, if it is chosen. */
async function make(path, file, query, signal) {
  const headers = { "Content-Type": "application/octet-stream" };
  const options = { method: "POST", body: file, headers, signal };
  return request("blob", `${path}?${new URLSearchParams(query)}`, options, file);
}

/** Make the heatmap of a landmark; `query` names model and landmark, too. */
export const makeHeatmap = (...scan) => make("v1/heatmaps", ...scan);

/** Convert a scan to NIfTI; what is passing is tried again, but not for long: its landmarks are shown afterwards. */
export function convertScan(file, choice, signal) {
  const end = Date.now() + PATIENCE_MS;
  const onWait = (problem, until) => { if (until > end) throw problem; };
  return persist(() => make("page/scan", file, choice, signal), signal, onWait);
}

/** Keep a scan with its answer, as corrected; `choice` is its frame or series. Return what is kept. */
export async function keepCase(file, answer, choice) {
  const body = new FormData();
  body.append("volume", file);
  body.append("answer", new Blob([JSON.stringify(answer)]));
  return request("json", `v1/cases?${new URLSearchParams(choice)}`, { method: "POST", body }, file);
}

/**
 * Send a scan; `query` names the model, and maybe frame or series. `onProgress` gets {stage: "upload", part} and the
 * service's progress events.
 * XMLHttpRequest is used because fetch does not report the progress of an upload.
 */
export function findLandmarks(file, query, { signal, onProgress }) {
  const upload = new XMLHttpRequest();
  upload.open("POST", `v1/landmarks?${new URLSearchParams(query)}`);
  const types = { Accept: "text/event-stream", "Content-Type": "application/octet-stream" };
  for (const [name, value] of Object.entries(headers(types))) upload.setRequestHeader(name, value);
  return new Promise((resolve, reject) => {
    let [read, sent] = [0, false];
    const isStream = () => upload.getResponseHeader("Content-Type")?.startsWith("text/event-stream");
    const readEvents = () => {
      const end = upload.responseText.lastIndexOf("\n\n");
      if (!isStream() || end < read) return;
      const events = upload.responseText.slice(read, end).split("\n\n");
      read = end + 2;
      for (const event of events.filter((block) => !block.startsWith(":"))) { // a comment ends a silence
        // A description may hold U+2028, which JSON leaves as it is, and a dot alone does not match.
        const [, name, data] = /^event: (.*)\ndata: (.*)$/s.exec(event);
        if (name === "progress") onProgress(JSON.parse(data));
        else if (name === "answer") resolve(JSON.parse(data));
        else reject(new Problem(JSON.parse(data)));
      }
    };
    upload.upload.onload = () => (sent = true);
    upload.upload.onprogress = ({ loaded, total }) => onProgress({ stage: "upload", part: loaded / total });
    upload.onprogress = readEvents;
    // A service that the scan ends may have said nothing before.
    const closed = () => foundOut(sent ? "broken-off" : "unreachable");
    upload.onerror = async () => reject(sent || (await isReadable(file)) ? closed() : foundOut("unreadable"));
    upload.onabort = () => reject(signal.reason);
    upload.onload = () => {
      readEvents();
      // Has no effect after an answer.
      const { status, responseText } = upload;
      reject(isStream() ? closed() : problemOf(responseText, status, upload.getResponseHeader("Retry-After")));
    };
    signal.addEventListener("abort", () => upload.abort());
    upload.send(file);
  });
}
