// Prints a line of TAP for each test, without a number, and the error of those that fail.
const print = console.log.bind(console);

function name(test) {
  return test.titlePath().join(" > ").replace(/#|\s+/g, " ").trim();
}

module.exports = function (runner) {
  runner.on("pass", (test) => print(`\nok - ${name(test)}`));
  runner.on("pending", (test) => print(`\nok - ${name(test)} # SKIP`));
  runner.on("fail", (test, error) => {
    print(`\nnot ok - ${name(test)}`);
    print(`${(error && error.stack) || error}`);
  });
};
