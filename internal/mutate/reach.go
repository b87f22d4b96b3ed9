// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// test is one of a package's tests, or a part of one: a pattern for go test -run, how long it takes, and which mutants make a
// difference to it. Any other is the original to it.
type test struct {
	pattern string
	took    time.Duration
	reaches map[int]bool
}

// long is how long a test may take that is not taken apart into its subtests.
const long = time.Second

// testsOf runs each test alone, without a mutant, the quickest first in what it returns. all is how long they take together.
func testsOf(ctx context.Context, o options, t *target, binary, work string) (tests []test, all time.Duration, err error) {
	list := command(ctx, binary, "-test.list", cmp.Or(o.run, "."))
	list.Dir = t.dir
	names, err := list.Output()
	if err != nil {
		return nil, 0, fmt.Errorf("listing the tests: %w", err)
	}
	one, reached := o, filepath.Join(work, "reached")
	alone := func(pattern string) (found test, subtests []string, err error) {
		one.run = pattern
		r := tryWith(ctx, one, t, binary, 0, []string{reachedFile + "=" + reached}, "-test.v")
		reaches, err := readReached(reached)
		switch {
		case ctx.Err() != nil:
			return found, nil, ctx.Err()
		case r.killed:
			return found, nil, fmt.Errorf("the tests fail without a mutant: %s\n%s", r.by, r.output)
		case err != nil:
			return found, nil, err
		}
		return test{pattern, r.took, reaches}, partsOf(pattern, r.output), nil
	}
	idle, _, err := alone("^$") // how long it takes to start
	if err != nil {
		return nil, 0, err
	}
	// apart returns the test, or its subtests if it takes long and they pass alone.
	var apart func(whole test, subtests []string) []test
	apart = func(whole test, subtests []string) (parts []test) {
		if whole.took = withoutStart(whole.took, idle.took); whole.took < long || len(subtests) < 2 {
			return []test{whole}
		}
		for _, pattern := range subtests {
			part, more, err := alone(pattern)
			if err != nil {
				return []test{whole}
			}
			parts = append(parts, apart(part, more)...)
		}
		return parts
	}
	for _, name := range strings.Fields(string(names)) {
		if strings.HasPrefix(name, "Benchmark") {
			continue
		}
		whole, subtests, err := alone(exactly(name))
		if err != nil {
			return nil, 0, err
		}
		tests = append(tests, apart(whole, subtests)...)
	}
	if len(tests) == 0 {
		return nil, 0, errors.New("there are no tests")
	}
	for _, found := range tests {
		all += found.took
	}
	slices.SortStableFunc(tests, func(a, b test) int { return cmp.Compare(a.took, b.took) })
	return tests, all, ctx.Err()
}

// withoutStart is what a test takes beyond the start of its program, which was measured once. At least half of it remains: on a busy
// machine that start may have taken longer than others, and slowdown is more than two.
func withoutStart(took, start time.Duration) time.Duration { return max(took/2, took-start) }

// partsOf are the patterns for what is one level below a test, by what it prints with -test.v.
func partsOf(pattern, output string) (parts []string) {
	depth := strings.Count(pattern, "/") + 1
	for line := range strings.Lines(output) {
		name, ok := strings.CutPrefix(line, "=== RUN ")
		if path := strings.Split(strings.TrimSpace(name), "/"); ok && len(path) > depth {
			if part := exactly(path[:depth+1]...); !slices.Contains(parts, part) {
				parts = append(parts, part)
			}
		}
	}
	return parts
}

// exactly matches the test of that name, or the subtest with these above it.
func exactly(path ...string) string {
	for i, name := range path {
		path[i] = "^" + regexp.QuoteMeta(name) + "$"
	}
	return strings.Join(path, "/")
}

// readReached reads which mutants make a difference to a run, and removes the file.
func readReached(path string) (map[int]bool, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	ids := map[int]bool{}
	for _, line := range strings.Fields(string(text)) {
		id, err := strconv.Atoi(line)
		if err != nil {
			return nil, fmt.Errorf("which mutants make a difference to a test: %w", err)
		}
		ids[id] = true
	}
	return ids, os.Remove(path)
}

// stagesOf says how to run the tests that can notice a mutant: those that take no time first, which kill most, then in each stage what
// takes four times as long. A mutant that makes no difference to any survives without a run.
func stagesOf(o options, tests []test, id int) (stages []options) {
	can := slices.DeleteFunc(slices.Clone(tests), func(t test) bool { return !t.reaches[id] })
	for most := quick; len(can) > 0; most *= 4 {
		n, sum, names := 0, time.Duration(0), []string(nil)
		for n < len(can) && can[n].took <= most {
			sum, names = sum+can[n].took, append(names, can[n].pattern)
			n++
		}
		if n > 0 {
			stage := o
			stage.run = strings.Join(names, "|")
			stage.patience = min(o.patience, slowdown*sum+grace)
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
