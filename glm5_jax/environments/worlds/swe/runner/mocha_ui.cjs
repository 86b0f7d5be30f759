// Mocha's functions, and those that tests of Jest and Vitest expect beside them.
const { format } = require("util");
const { interfaces } = require("mocha");
const { expect } = require("expect");

interfaces.mocha_ui = module.exports = function (suite) {
  interfaces.bdd(suite);
  suite.on("pre-require", (context) => {
    context.test = context.it;
    context.beforeAll = context.before;
    context.afterAll = context.after;
    context.expect ??= expect;
    for (const name of ["it", "test", "describe"]) {
      const make = context[name];
      make.each = (rows) => (title, body) =>
        rows.forEach((row) => {
          const values = Array.isArray(row) ? row : [row];
          const shown = (title.match(/%[sdifjoO]/g) || []).length;
          make(format(title, ...values.slice(0, shown)), () => body(...values));
        });
    }
  });
};
