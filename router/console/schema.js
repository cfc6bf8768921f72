// What of a JSON schema a value breaks. Pure; a check of the server's promise, made apart from it.

const TYPES = {
  null: (value) => value === null,
  boolean: (value) => typeof value === "boolean",
  number: (value) => typeof value === "number",
  integer: (value) => Number.isInteger(value),
  string: (value) => typeof value === "string",
  array: Array.isArray,
  object: isObject,
};

// Keywords that say nothing of which values are valid.
const SILENT = new Set([
  ...["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"],
  ...["$schema", "$id", "$comment", "$defs", "definitions"],
]);

const CHECKS = {
  type: (value, type) => (listOf(type).some((name) => TYPES[name]?.(value)) ? null : `expected ${listOf(type).join(" or ")}`),
  enum: (value, allowed) => (allowed.some((one) => equal(one, value)) ? null : "none of the allowed values"),
  const: (value, wanted) => (equal(value, wanted) ? null : `expected ${JSON.stringify(wanted)}`),
  minimum: (value, least) => (typeof value !== "number" || value >= least ? null : `less than ${least}`),
  maximum: (value, most) => (typeof value !== "number" || value <= most ? null : `more than ${most}`),
  exclusiveMinimum: (value, bound) => (typeof value !== "number" || value > bound ? null : `not more than ${bound}`),
  exclusiveMaximum: (value, bound) => (typeof value !== "number" || value < bound ? null : `not less than ${bound}`),
  multipleOf: (value, step) => (typeof value !== "number" || isMultiple(value, step) ? null : `no multiple of ${step}`),
  minLength: (value, least) => (typeof value !== "string" || [...value].length >= least ? null : `shorter than ${least}`),
  maxLength: (value, most) => (typeof value !== "string" || [...value].length <= most ? null : `longer than ${most}`),
  pattern: (value, source) => (typeof value !== "string" || new RegExp(source, "u").test(value) ? null : `does not match ${source}`),
  minItems: (value, least) => (!Array.isArray(value) || value.length >= least ? null : `fewer than ${least} items`),
  maxItems: (value, most) => (!Array.isArray(value) || value.length <= most ? null : `more than ${most} items`),
  uniqueItems: (value, asked) => (!asked || !Array.isArray(value) || isUnique(value) ? null : "an item occurs twice"),
  required: (value, names) => absent(value, names),
  minProperties: (value, least) => (!isObject(value) || Object.keys(value).length >= least ? null : `fewer than ${least} properties`),
  maxProperties: (value, most) => (!isObject(value) || Object.keys(value).length <= most ? null : `more than ${most} properties`),
};

/**
 * Checks a value. {problem, unchecked}: the first thing that is wrong with it ("$.a: expected
 * string"), or null; and the keywords that this check knows nothing of.
 */
export function check(value, schema) {
  const unchecked = new Set();
  return { problem: new Walk(schema, unchecked).problem(value, schema, "$"), unchecked: [...unchecked] };
}

class Walk {
  constructor(root, unchecked) {
    this.root = root;
    this.unchecked = unchecked;
    this.open = new Set(); // references being followed at a value: a circle says nothing more of it
  }

  problem(value, schema, path) {
    if (schema === true || schema === undefined) return null;
    if (schema === false) return `${path}: not allowed`;
    for (const [keyword, wanted] of Object.entries(schema)) {
      const found = this.keyword(value, schema, keyword, wanted, path);
      if (found) return found;
    }
    return null;
  }

  keyword(value, schema, keyword, wanted, path) {
    try {
      if (Object.hasOwn(PARTS, keyword)) return PARTS[keyword](this, value, wanted, path, schema);
      if (Object.hasOwn(CHECKS, keyword)) {
        const found = CHECKS[keyword](value, wanted);
        return found && `${path}: ${found}`;
      }
    } catch {
      this.unchecked.add(keyword); // a pattern, say, that browsers read in another way
      return null;
    }
    if (!SILENT.has(keyword)) this.unchecked.add(keyword);
    return null;
  }

  fits(value, schema, path) {
    return this.problem(value, schema, path) === null;
  }

  follow(value, reference, path) {
    const target = resolve(this.root, reference);
    const visit = `${reference} ${path}`;
    if (target === undefined) this.unchecked.add("$ref");
    if (target === undefined || this.open.has(visit)) return null;
    this.open.add(visit);
    const found = this.problem(value, target, path);
    this.open.delete(visit);
    return found;
  }

  first(entries, path) {
    for (const [name, value, schema] of entries) {
      const found = this.problem(value, schema, `${path}${typeof name === "number" ? `[${name}]` : `.${name}`}`);
      if (found) return found;
    }
    return null;
  }
}

const PARTS = {
  $ref: (walk, value, reference, path) => walk.follow(value, reference, path),
  allOf: (walk, value, all, path) => all.map((one) => walk.problem(value, one, path)).find(Boolean) ?? null,
  anyOf: (walk, value, any, path) => (any.some((one) => walk.fits(value, one, path)) ? null : `${path}: fits no alternative`),
  oneOf(walk, value, any, path) {
    const fitting = any.filter((one) => walk.fits(value, one, path)).length;
    return fitting === 1 ? null : `${path}: fits ${fitting} alternatives instead of one`;
  },
  not: (walk, value, other, path) => (walk.fits(value, other, path) ? `${path}: is what it must not be` : null),
  properties(walk, value, known, path) {
    if (!isObject(value)) return null;
    const names = Object.keys(known).filter((name) => Object.hasOwn(value, name));
    return walk.first(names.map((name) => [name, value[name], known[name]]), path);
  },
  patternProperties(walk, value, patterns, path) {
    if (!isObject(value)) return null;
    const entries = Object.entries(patterns).map(([source, schema]) => [new RegExp(source, "u"), schema]);
    return walk.first(entries.flatMap(([regex, schema]) => named(value, (name) => regex.test(name), schema)), path);
  },
  additionalProperties(walk, value, schema, path, around) {
    if (!isObject(value)) return null;
    const regexes = Object.keys(around.patternProperties ?? {}).map((source) => new RegExp(source, "u"));
    const isOther = (name) => !Object.hasOwn(around.properties ?? {}, name) && !regexes.some((regex) => regex.test(name));
    return walk.first(named(value, isOther, schema), path);
  },
  propertyNames: (walk, value, schema, path) => (isObject(value) ? walk.first(Object.keys(value).map((name) => [name, name, schema]), path) : null),
  prefixItems: (walk, value, schemas, path) => (Array.isArray(value) ? walk.first(schemas.slice(0, value.length).map((schema, at) => [at, value[at], schema]), path) : null),
  items(walk, value, schema, path, around) {
    if (!Array.isArray(value)) return null;
    if (Array.isArray(schema)) return PARTS.prefixItems(walk, value, schema, path);
    const from = around.prefixItems?.length ?? 0;
    return walk.first(value.slice(from).map((item, at) => [from + at, item, schema]), path);
  },
};

function named(value, chosen, schema) {
  return Object.keys(value).filter(chosen).map((name) => [name, value[name], schema]);
}

function resolve(root, reference) {
  if (reference !== "#" && !reference.startsWith("#/")) return undefined;
  const steps = reference.slice(2).split("/").filter(() => reference !== "#");
  return steps.reduce((node, step) => node?.[decodeURIComponent(step).replaceAll("~1", "/").replaceAll("~0", "~")], root);
}

function absent(value, names) {
  if (!isObject(value)) return null;
  const name = names.find((one) => !Object.hasOwn(value, one));
  return name === undefined ? null : `lacks ${JSON.stringify(name)}`;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isMultiple(value, step) {
  const times = value / step;
  return Math.abs(times - Math.round(times)) < 1e-9 * Math.max(1, Math.abs(times));
}

function isUnique(items) {
  return items.every((item, at) => !items.slice(0, at).some((other) => equal(other, item)));
}

function listOf(value) {
  return Array.isArray(value) ? value : [value];
}

function equal(one, other) {
  if (one === other) return true;
  if (Array.isArray(one)) return Array.isArray(other) && one.length === other.length && one.every((item, at) => equal(item, other[at]));
  if (!isObject(one) || !isObject(other)) return false;
  const names = Object.keys(one);
  return names.length === Object.keys(other).length && names.every((name) => Object.hasOwn(other, name) && equal(one[name], other[name]));
}
