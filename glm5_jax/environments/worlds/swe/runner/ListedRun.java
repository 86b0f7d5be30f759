import java.io.PrintStream;
import java.util.HashSet;
import java.util.Set;
import org.junit.runner.Description;
import org.junit.runner.JUnitCore;
import org.junit.runner.notification.Failure;
import org.junit.runner.notification.RunListener;

/** Runs test classes of JUnit 4 and 3, and writes each test's outcome as TAP. */
public class ListedRun extends RunListener {
    private static final PrintStream OUT = System.out;
    private final Set<Description> known = new HashSet<>();

    public static void main(String[] names) throws Exception {
        JUnitCore core = new JUnitCore();
        core.addListener(new ListedRun());
        boolean isGood = true;
        for (String name : names) {
            isGood &= core.run(Class.forName(name)).wasSuccessful();
        }
        OUT.flush();
        Runtime.getRuntime().halt(isGood ? 0 : 1);
    }

    @Override
    public void testFailure(Failure failure) {
        tell("not ok", failure.getDescription(), "");
        OUT.println(failure.getTrace());
    }

    @Override
    public void testAssumptionFailure(Failure failure) {
        tell("ok", failure.getDescription(), " # SKIP");
    }

    @Override
    public void testIgnored(Description test) {
        tell("ok", test, " # SKIP");
    }

    @Override
    public void testFinished(Description test) {
        if (!known.contains(test)) {
            tell("ok", test, "");
        }
    }

    private void tell(String outcome, Description test, String more) {
        known.add(test);
        OUT.println();
        OUT.println(outcome + " - " + test.getDisplayName().replace('\n', ' ') + more);
    }
}
