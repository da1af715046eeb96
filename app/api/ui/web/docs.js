// The interactive documentation: asks for a key where one is needed, and lists all calls in Swagger UI.

import { element } from "./element.js";
import { describeCalls, setKey } from "./service.js";

/** List the calls, which are then tried with a key, or ask for another one. */
async function list(key) {
  try {
    const spec = await describeCalls();
    element("ask-key").hidden = true;
    element("problem").textContent = "";
    const ui = SwaggerUIBundle({
      spec, dom_id: "#calls", deepLinking: true, showExtensions: true, showCommonExtensions: true,
      onComplete: () => key && ui.preauthorizeApiKey("api_key", key),
    });
  } catch (problem) {
    const isRefused = problem.code === "unauthorized";
    element("ask-key").hidden = !isRefused;
    element("problem").textContent = isRefused ? key && "The service did not accept the key." : problem.message;
    element("key").focus();
  }
}

element("ask-key").onsubmit = (event) => {
  event.preventDefault();
  list(setKey(element("key").value));
};
await list("");
