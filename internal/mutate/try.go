// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// result is what became of a mutant.
type result struct {
	killed bool
	by     string // the first test that failed, or what else ended the run
	output string
	took   time.Duration // of one that passed
}

// tryPackage tries the mutants of a package, or its seeded bugs, and prints what
// becomes of them.
func tryPackage(ctx context.Context, out io.Writer, o options, pattern string) (ok bool, err error) {
	t, err := load(ctx, pattern)
	if err != nil {
		return false, err
	}
	notes, err := readNotes(t)
	if err != nil {
		return false, err
	}
	work, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(work)

	if o.seedsOnly {
		return trySeeds(ctx, out, o, t, notes, work)
	}
	mutants, overlay, err := t.mutate(work)
	if err != nil {
		return false, err
	}
	changed := t.path
	if o.tests != "" {
		if t, err = load(ctx, o.tests); err != nil {
			return false, err
		}
	}
	binary, raceBinary := filepath.Join(work, "test"), filepath.Join(work, "race")
	if err := build(ctx, t, overlay, binary); err != nil {
		return false, err
	}
	tests, took, err := testsOf(ctx, o, t, binary, work)
	if err != nil {
		return false, err
	}
	slowest := tests[len(tests)-1]
	fmt.Fprintf(out, "%s: %d mutants, the tests take %s, of which %s takes %s\n",
		changed, len(mutants), took.Round(100*time.Millisecond), slowest.pattern, slowest.took.Round(100*time.Millisecond))

	chosen := choose(o, mutants)
	results := tryAll(ctx, o, chosen, func(id int) result { return tryStages(ctx, stagesOf(o, tests, id), t, binary, id) })
	survivors := slices.DeleteFunc(slices.Clone(chosen), func(id int) bool {
		return results[id].killed || !mutants[id-1].needsRace || notes.reason(mutants[id-1]) != ""
	})
	if len(survivors) > 0 {
		if err := build(ctx, t, overlay, raceBinary, "-race"); err != nil {
			return false, err
		}
		o := o
		o.patience *= raceFactor
		for id, r := range tryAll(ctx, o, survivors, func(id int) result {
			stages := stagesOf(o, tests, id)
			for i := range stages {
				stages[i].patience = o.patience
			}
			return tryStages(ctx, stages, t, raceBinary, id)
		}) {
			results[id] = r
		}
	}
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	return report(out, o, changed, notes, mutants, chosen, results), nil
}

// choose returns the IDs of the mutants to try, in their order.
func choose(o options, mutants []mutant) (ids []int) {
	for i, m := range mutants {
		if strings.Contains(m.name(), o.only) {
			ids = append(ids, i+1)
		}
	}
	if o.sample > 0 && o.sample < len(ids) {
		random := rand.New(rand.NewPCG(o.seed, 0))
		random.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		ids = ids[:o.sample]
		slices.Sort(ids)
	}
	return ids
}

// mutate writes the package with all mutants, and go's overlay for it.
func (t *target) mutate(work string) ([]mutant, string, error) {
	var mutants []mutant
	replace := map[string]string{}
	write := func(name, text string) error {
		path := filepath.Join(work, name)
		replace[filepath.Join(t.dir, name)] = path
		return os.WriteFile(path, []byte(text), 0o600)
	}
	for _, s := range t.files {
		w := &walk{target: t, source: s, mutants: &mutants, names: map[string]int{}, paired: map[ast.Stmt]bool{}}
		w.file()
		if err := write(s.name, w.mutated()); err != nil {
			return nil, "", err
		}
	}
	if err := write("zz_mutants.go", switches(t.name, len(mutants))); err != nil {
		return nil, "", err
	}
	overlay, err := writeOverlay(work, replace)
	return mutants, overlay, err
}

func writeOverlay(work string, replace map[string]string) (path string, err error) {
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path = filepath.Join(work, "overlay.json")
	return path, os.WriteFile(path, text, 0o600)
}

func build(ctx context.Context, t *target, overlay, binary string, flags ...string) error {
	args := append([]string{"test", "-c", "-vet=off", "-ldflags=-s -w", "-o", binary}, flags...)
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	if err := command(ctx, "go", append(args, t.path)...).Run(); err != nil {
		return fmt.Errorf("compiling the tests: %w", err)
	}
	return nil
}

const (
	// raceFactor is how much longer tests may take with the race detector.
	raceFactor = 6
	// quick is how long a test may take that is among the first to be run.
	quick = 100 * time.Millisecond
	// slowdown is how much longer tests with a mutant may take than without one, and
	// grace what they may take beyond that.
	slowdown = 5
	grace    = 5 * time.Second
)

var failedTest = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

// try runs the tests with one mutant. A run that does not end, or dies, has
// noticed it, too.
func try(ctx context.Context, o options, t *target, binary string, id int, flags ...string) result {
	return tryWith(ctx, o, t, binary, id, nil, flags...)
}

// tryWith is try with more in the environment. What a run that was ended leaves in its temporary folder is removed.
func tryWith(ctx context.Context, o options, t *target, binary string, id int, env []string, flags ...string) result {
	temp, err := os.MkdirTemp(o.temp, "mutant-")
	if err != nil {
		return result{killed: true, by: err.Error()}
	}
	defer os.RemoveAll(temp)
	args := append([]string{"-test.short", "-test.timeout", "0", "-test.run", o.run}, flags...)
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir = t.dir
	cmd.Env = append(append(os.Environ(), fmt.Sprintf("%s=%d", environment, id), "GOMEMLIMIT=1GiB", "GOTRACEBACK=none", "TMPDIR="+temp,
		"RAPID_NOFAILFILE=true"), env...) // else the next run begins with what failed in this one
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.WaitDelay = time.Second
	run := watched{cmd: cmd, patience: o.patience}
	err = run.run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return result{output: output.String(), took: run.took}
	case run.ended:
		return result{killed: true, by: doNotEnd}
	case !errors.As(err, &exit):
		return result{killed: true, by: err.Error()}
	}
	var failed []string
	for _, match := range failedTest.FindAllStringSubmatch(output.String(), -1) {
		if name, _, sub := strings.Cut(match[1], "/"); !sub && !slices.Contains(failed, name) {
			failed = append(failed, name)
		}
	}
	switch {
	case len(failed) > 0:
		return result{killed: true, by: strings.Join(failed, ", "), output: output.String()}
	default:
		return result{killed: true, by: firstLine(output.String()), output: output.String()}
	}
}

const doNotEnd = "the tests do not end"

func firstLine(s string) string {
	for line := range strings.Lines(s) {
		if strings.HasPrefix(line, "panic:") || strings.HasPrefix(line, "fatal error:") {
			return strings.TrimSpace(line)
		}
	}
	return "the run died"
}

// tryAll tries some mutants, several at a time.
func tryAll(ctx context.Context, o options, ids []int, try func(id int) result) map[int]result {
	results, todo := map[int]result{}, make(chan int)
	var mutex sync.Mutex
	var workers sync.WaitGroup
	for range max(1, o.parallel) {
		workers.Go(func() {
			for id := range todo {
				r := try(id)
				mutex.Lock()
				results[id] = r
				if len(results)%50 == 0 {
					fmt.Fprintf(os.Stderr, "%d of %d tried\n", len(results), len(ids))
				}
				mutex.Unlock()
			}
		})
	}
	for _, id := range ids {
		if ctx.Err() != nil {
			break
		}
		todo <- id
	}
	close(todo)
	workers.Wait()
	return results
}

// report prints what became of each mutant, and the percentage. It is ok if enough
// of them were killed, and each of the others is listed with the reason why no test
// can tell it from the original.
func report(out io.Writer, o options, path string, notes notes, mutants []mutant, chosen []int, results map[int]result) (ok bool) {
	killed, survived, equivalent, endless := 0, 0, 0, 0
	ok = true
	for _, id := range chosen {
		m, r := mutants[id-1], results[id]
		place, reason := fmt.Sprintf("%s:%d", m.file, m.line), notes.reason(m)
		switch {
		case r.killed && reason != "":
			ok = false
			fmt.Fprintf(out, "WRONGLY LISTED as equivalent  %-18s %s\n%30s killed by %s\n", place, m.name(), "", r.by)
		case r.killed:
			killed++
			if r.by == doNotEnd {
				endless++
			}
			fmt.Fprintf(out, "killed     %-18s %s: %s  [%s]\n", place, m.function, m.what, r.by)
		case reason != "":
			equivalent++
			fmt.Fprintf(out, "equivalent %-18s %s: %s  (%s)\n", place, m.function, m.what, reason)
		default:
			ok = ok && o.unlisted
			survived++
			fmt.Fprintf(out, "SURVIVED   %-18s %s: %s\n", place, m.function, m.what)
		}
	}
	if len(chosen) == len(mutants) && o.only == "" {
		for _, e := range notes.Equivalent {
			if !slices.ContainsFunc(mutants, func(m mutant) bool { return m.name() == e.Mutant }) {
				ok = false
				fmt.Fprintf(out, "NO SUCH MUTANT: %s\n", e.Mutant)
			}
		}
	}
	percent, sampled, all := 100.0, "", killed+survived+equivalent
	if all > 0 {
		percent = 100 * float64(killed) / float64(all)
	}
	if all < len(mutants) && o.only == "" {
		low, high := interval(killed, all)
		sampled = fmt.Sprintf(" in a sample of %d of %d (of all of them it is %.1f to %.1f %%, with 95 %% confidence)", all,
			len(mutants), 100*low, 100*high)
	}
	fmt.Fprintf(out, "%s: %d mutants killed (%d because the tests did not end), %d survived without an explanation, %d with one: %.1f %% "+
		"killed%s (at least %.0f %% wanted)\n",
		path, killed, endless, survived, equivalent, percent, sampled, o.atLeast)
	return ok && percent >= o.atLeast
}

// interval is Wilson's of 95 % confidence for a share of which a sample has hits of n.
func interval(hits, n int) (low, high float64) {
	const z = 1.96
	share, count := float64(hits)/float64(n), float64(n)
	middle, half := share+z*z/(2*count), z*math.Sqrt(share*(1-share)/count+z*z/(4*count*count))
	return (middle - half) / (1 + z*z/count), (middle + half) / (1 + z*z/count)
}
