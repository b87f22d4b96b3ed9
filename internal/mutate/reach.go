package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// test is one of a package's tests: how long it takes, and which mutants it comes by. A mutant that it does not come by is the original to it.
type test struct {
	name    string
	took    time.Duration
	reaches map[int]bool
}

// testsOf runs each test alone, without a mutant, the quickest first in what it returns. all is how long they take together.
func testsOf(ctx context.Context, o options, t *target, binary, work string) (tests []test, all time.Duration, err error) {
	list := command(ctx, binary, "-test.list", cmp.Or(o.run, "."))
	list.Dir = t.dir
	names, err := list.Output()
	if err != nil {
		return nil, 0, fmt.Errorf("listing the tests: %w", err)
	}
	one, reached := o, filepath.Join(work, "reached")
	alone := func(name string) (time.Duration, error) {
		one.run = only(name)
		start := time.Now()
		r := tryWith(ctx, one, t, binary, 0, []string{reachedFile + "=" + reached}, "-test.failfast")
		if r.killed && ctx.Err() == nil {
			return 0, fmt.Errorf("the tests fail without a mutant: %s\n%s", r.by, r.output)
		}
		return time.Since(start), ctx.Err()
	}
	idle, err := alone("") // how long it takes to start
	if err != nil {
		return nil, 0, err
	}
	for _, name := range strings.Fields(string(names)) {
		if strings.HasPrefix(name, "Benchmark") {
			continue
		}
		took, err := alone(name)
		if err != nil {
			return nil, 0, err
		}
		found := test{name: name, took: max(0, took-idle)}
		if found.reaches, err = readReached(reached); err != nil {
			return nil, 0, err
		}
		tests, all = append(tests, found), all+found.took
	}
	if len(tests) == 0 {
		return nil, 0, errors.New("there are no tests")
	}
	slices.SortStableFunc(tests, func(a, b test) int { return cmp.Compare(a.took, b.took) })
	return tests, all, nil
}

// readReached reads which mutants a run came by, and removes the file.
func readReached(path string) (map[int]bool, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	ids := map[int]bool{}
	for _, line := range strings.Fields(string(text)) {
		id, err := strconv.Atoi(line)
		if err != nil {
			return nil, fmt.Errorf("which mutants a test comes by: %w", err)
		}
		ids[id] = true
	}
	return ids, os.Remove(path)
}

// only matches these tests.
func only(names ...string) string { return "^(" + strings.Join(names, "|") + ")$" }

// stagesOf says how to run the tests that can notice a mutant: those that take no time first, which kill most, then in each stage what takes four times
// as long. A mutant that no test came by is tried with all of them: what they do may be random.
func stagesOf(o options, tests []test, id int) (stages []options) {
	can := slices.DeleteFunc(slices.Clone(tests), func(t test) bool { return !t.reaches[id] })
	if len(can) == 0 {
		can = tests
	}
	for most := quick; len(can) > 0; most *= 4 {
		n, sum, names := 0, time.Duration(0), []string(nil)
		for n < len(can) && can[n].took <= most {
			sum, names = sum+can[n].took, append(names, can[n].name)
			n++
		}
		if n > 0 {
			stage := o
			stage.run = only(names...)
			stage.patience = min(o.patience, slowdown*(sum+quick))
			stages = append(stages, stage)
		}
		can = can[n:]
	}
	return stages
}

// tryStages runs the tests stage by stage, until one notices the mutant.
func tryStages(ctx context.Context, stages []options, t *target, binary string, id int) (r result) {
	for _, stage := range stages {
		if r = try(ctx, stage, t, binary, id, "-test.failfast"); r.killed {
			break
		}
	}
	return r
}
