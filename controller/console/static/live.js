// Shows the controller's state as it changes. Text goes in as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);

function facts(id, pairs) {
  const list = byId(id);
  list.replaceChildren();
  for (const [name, value] of pairs) {
    const term = document.createElement("dt");
    const detail = document.createElement("dd");
    term.textContent = name;
    detail.textContent = value;
    list.append(term, detail);
  }
}

const number = (value, unit) => (value === null ? "not known" : `${value.toPrecision(3)} ${unit}`.trim());
const clock = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleTimeString();

function percentile(bucket) {
  if (bucket === null) return "no requests";
  const milliseconds = (seconds) => Math.round(seconds * 1000);
  if (bucket.high_s === null) return `above ${milliseconds(bucket.low_s)} ms`;
  return `${milliseconds(bucket.low_s)} to ${milliseconds(bucket.high_s)} ms`;
}

function showRollout(rollout) {
  if (rollout === null) return;
  byId("rollout-sentence").textContent = rollout.sentence;
  const bar = byId("rollout-weights");
  bar.replaceChildren();
  for (const [arm, weight] of Object.entries(rollout.weights)) {
    if (weight === 0) continue;
    const part = document.createElement("span");
    part.className = arm;
    part.style.flexGrow = weight;
    part.textContent = `${arm} ${weight} %`;
    bar.append(part);
  }
  const pairs = [
    ["rollout", `${rollout.id} of ${rollout.configuration_id} (${rollout.origin})`],
    ["phase", rollout.paused ? `${rollout.phase}, paused` : rollout.phase],
    ["step", `${rollout.step} of ${rollout.num_steps}`],
    ["since", clock(rollout.phase_entered_unix_s)],
  ];
  if (rollout.inject !== null) pairs.push(["injected fault", rollout.inject]);
  for (const check of rollout.verdict?.checks ?? []) pairs.push([`check ${check.metric}`, `${check.result}: ${check.reason}`]);
  facts("rollout-facts", pairs);
}

function showExperiment(experiment) {
  if (experiment === null) return;
  const progress = experiment.progress;
  const told = experiment.reason ?? progress?.told ?? "starting";
  byId("experiment-sentence").textContent = `Experiment ${experiment.id} (${experiment.state}): ${told}`;
  const bar = byId("experiment-progress");
  bar.hidden = experiment.state !== "running";
  bar.value = progress?.done_ratio ?? 0;
}

function showTraffic(traffic) {
  if (traffic === null) {
    facts("traffic-facts", [["figures", "none yet"]]);
    return;
  }
  facts("traffic-facts", [
    ["requests", number(traffic.requests_per_s, "per s")],
    ["output", number(traffic.output_tokens_per_s, "tokens per s")],
    ["TTFT, 95th percentile", percentile(traffic.ttft_p95)],
    ["TPOT, 95th percentile", percentile(traffic.tpot_p95)],
    ["errors", traffic.error_ratio === null ? "no requests" : `${(traffic.error_ratio * 100).toFixed(2)} %`],
    ["running, waiting", `${number(traffic.running, "")}, ${number(traffic.waiting, "")}`],
    ["KV cache in use", traffic.kv_usage_ratio === null ? "not known" : `${(traffic.kv_usage_ratio * 100).toFixed(0)} %`],
  ]);
}

function showDecisions(decisions) {
  const body = byId("decisions");
  body.replaceChildren();
  for (const decision of decisions) {
    const row = document.createElement("tr");
    for (const text of [clock(decision.at_unix_s), decision.actor, decision.subject, decision.sentence]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    body.append(row);
  }
}

function show(state) {
  const problem = byId("problem");
  problem.hidden = state.problem === null;
  problem.textContent = state.problem ?? "";
  byId("configuration-id").textContent = state.target.configuration_id;
  facts("configuration-facts", Object.entries(state.target.configuration));
  showRollout(state.rollout);
  showExperiment(state.experiment);
  showTraffic(state.traffic);
  showDecisions(state.decisions);
}

const events = new EventSource("/api/v1/events");
events.addEventListener("state", (event) => {
  byId("connection").textContent = "live";
  show(JSON.parse(event.data));
});
events.addEventListener("error", () => {
  byId("connection").textContent = "connection lost; trying again";
});
