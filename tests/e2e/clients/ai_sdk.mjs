// The AI SDK with its provider for Anthropic's API: texts, tools, objects, whole and streamed.
// Arguments: the server's address, a folder with the packages.
import { createRequire } from "node:module";

const [url, folder] = process.argv.slice(2);
const require = createRequire(`${folder}/`);
const { createAnthropic } = require("@ai-sdk/anthropic");
const { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");

const model = createAnthropic({ baseURL: `${url}/v1`, apiKey: "unused" });
const settings = { maxOutputTokens: 200, temperature: 0, maxRetries: 0 };
const prompt = "Please cancel order #10442 for two linen aprons, it's urgent. Thanks, Ines Novak";
const question = "What is the weather in Porto?";
const schema = jsonSchema({
  type: "object",
  properties: {
    city: { type: "string", maxLength: 12 },
    unit: { enum: ["celsius", "fahrenheit"] },
  },
  required: ["city", "unit"],
  additionalProperties: false,
});
const weather = tool({
  description: "Weather of a city",
  inputSchema: schema,
  execute: async ({ city, unit }) => `21 degrees (${unit}) in ${city}`,
});

function check(condition, what) {
  if (!condition) throw new Error(what);
}

const steps = {
  async text() {
    const whole = await generateText({ model: model("json"), prompt, ...settings });
    check(whole.text.startsWith("{"), `text: ${whole.text}`);
    const stream = streamText({ model: model("json"), prompt, ...settings });
    check((await stream.text) === whole.text, "text of a stream");
  },
  async loop() {
    const tools = { weather };
    const asked = { model: model("tools"), prompt: question, tools, ...settings };
    const forced = await generateText({ ...asked, toolChoice: "required" });
    check(forced.toolCalls[0]?.toolName === "weather", "a call that is demanded");
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
    const whole = await generateText({ ...asked, prepareStep, stopWhen: stepCountIs(3) });
    check(whole.steps.length === 2, `steps: ${whole.steps.length}`);
    const told = { model: model("json"), prompt: question, tools, ...settings };
    const called = await generateText({ ...told, toolChoice: { type: "tool", toolName: "weather" } });
    check(called.toolCalls[0].input.city.length <= 12, "a call without a template of tools");
  },
  async object() {
    const whole = await generateObject({ model: model("json"), schema, prompt, ...settings });
    check(["celsius", "fahrenheit"].includes(whole.object.unit), "an object");
  },
  async thinking() {
    const thinking = { type: "enabled", budgetTokens: 100 };
    const providerOptions = { anthropic: { thinking } };
    const asked = { model: model("json"), prompt, maxRetries: 0, maxOutputTokens: 20 };
    const whole = await generateText({ ...asked, providerOptions });
    check(whole.text.length > 0, "a text beside a budget for thinking");
  },
};

const failed = [];
for (const [name, step] of Object.entries(steps)) {
  try {
    await step();
  } catch (error) {
    failed.push(`${name}: ${error.stack}`);
  }
}
console.log(failed.length ? failed.join("\n") : "all checks passed");
process.exitCode = failed.length ? 1 : 0;
