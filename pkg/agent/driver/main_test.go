package driver_test

import (
	"flag"
	"os"
	"testing"
)

// TestMain lets more tests run at a time than there are processors: those that may run beside others wait for an agent's clock most of the time.
// A test that reads metrics may not: they are the process's.
func TestMain(m *testing.M) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", "12"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}
