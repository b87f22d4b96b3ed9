// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// notes are what a package says of its mutants, in testdata/mutants.yaml.
type notes struct {
	// Equivalent are mutants that no test can tell from the original.
	Equivalent []struct {
		// Mutant is its name, as printed: "file.go function: what".
		Mutant string `json:"mutant"`
		Reason string `json:"reason"`
	} `json:"equivalent"`
	// Seeds are bugs of more than one line.
	Seeds []seed `json:"seeds"`
}

// seed is a bug.
type seed struct {
	Name        string `json:"name"`
	replacement `json:",inline"`
	// Also are the other places that have to change for it.
	Also []replacement `json:"also"`
	// CaughtBy are the tests that must fail; others may, too.
	CaughtBy string `json:"caughtBy"`
	// History is the seed of a random history that fails with it, and is tried before all others.
	History int `json:"history"`
	// NoHistory is why no random history can show it. Then CaughtBy are tests that play none.
	NoHistory string `json:"noHistory"`
	// In is the folder of the package with these tests, if it is another one.
	In string `json:"in"`
}

// replacement is a change: the text Old of a file, which must be there once, becomes New.
type replacement struct {
	// File is relative to the package's folder; other packages have files, too.
	File string `json:"file"`
	Old  string `json:"old"`
	New  string `json:"new"`
}

func readNotes(t *target) (n notes, err error) {
	path := filepath.Join(t.dir, "testdata", "mutants.yaml")
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	if err != nil {
		return n, err
	}
	if err := yaml.UnmarshalStrict(text, &n); err != nil {
		return n, fmt.Errorf("%s: %w", path, err)
	}
	for i, e := range n.Equivalent {
		if e.Mutant == "" || e.Reason == "" {
			return n, fmt.Errorf("%s: equivalent[%d]: a mutant and a reason are needed", path, i)
		}
	}
	for i, s := range n.Seeds {
		if s.Name == "" || s.File == "" || s.Old == "" || strings.TrimSpace(s.CaughtBy) == "" {
			return n, fmt.Errorf("%s: seeds[%d]: a name, a file, an old text and the tests that catch it are needed", path, i)
		}
		if s.NoHistory == "" && s.In != "" || s.NoHistory != "" && s.History != 0 {
			return n, fmt.Errorf("%s: seeds[%d]: noHistory is needed for tests in another package, and goes without a history", path, i)
		}
	}
	return n, nil
}

// reason says why a mutant is equivalent, and nothing if it is not listed.
func (n notes) reason(m mutant) string {
	for _, e := range n.Equivalent {
		if e.Mutant == m.name() {
			return e.Reason
		}
	}
	return ""
}

// trySeeds tries the seeded bugs and lists all tests that fail.
func trySeeds(ctx context.Context, out io.Writer, o options, t *target, n notes, work string) (ok bool, err error) {
	begin := time.Now()
	overlay, err := n.switched(t, work)
	if err != nil {
		return false, err
	}
	var chosen []int
	places := map[string]place{} // where tests are, by the folders
	for i, s := range n.Seeds {
		if !strings.Contains(s.Name, o.only) {
			continue
		}
		chosen = append(chosen, i)
		if _, ok := places[s.In]; ok {
			continue
		}
		p := place{t, filepath.Join(work, fmt.Sprint("test-", len(places)))}
		if s.In != "" {
			dir := filepath.Join(t.dir, s.In)
			p.target = &target{dir: dir, path: dir}
		}
		if err := build(ctx, p.target, overlay, p.binary); err != nil {
			return false, err
		}
		places[s.In] = p
	}
	if o.random > 0 {
		fmt.Fprintf(out, "%s: the tests are built in %s\n", t.path, time.Since(begin).Round(time.Second))
	}
	lines, passed := make([]string, len(n.Seeds)), make([]bool, len(n.Seeds))
	tryAll(ctx, o, chosen, func(i int) result {
		lines[i], passed[i] = trySeed(ctx, o, n.Seeds[i], i+1, places[n.Seeds[i].In])
		return result{}
	})
	ok = true
	for _, i := range chosen {
		ok = ok && passed[i]
		fmt.Fprint(out, lines[i])
	}
	if o.random > 0 {
		fmt.Fprintf(out, "%s: %d seeded bugs in %s\n", t.path, len(chosen), time.Since(begin).Round(time.Second))
	}
	return ok, ctx.Err()
}

// place is where tests are, and the binary with them.
type place struct {
	*target
	binary string
}

// trySeed tries a seeded bug, whose switch is id, and says what caught it. The tests that must catch it must all do so.
func trySeed(ctx context.Context, o options, s seed, id int, t place) (line string, ok bool) {
	ok = true
	var caught []string
	var shown strings.Builder
	for _, test := range strings.Fields(s.CaughtBy) {
		one := inFull(o)
		one.run = "^" + strings.ReplaceAll(test, "/", "$/^") + "$"
		var r result
		where := ""
		switch {
		case o.random > 0 && s.NoHistory == "":
			r, where = tryRandom(ctx, one, t, id, s.History)
		case o.random > 0:
			r, where = tryCertain(ctx, one, t, id, nil)
		default:
			r = try(ctx, one, t.target, t.binary, id, fully...)
		}
		if !r.killed {
			ok = false
			caught = append(caught, "NOT by "+test+where)
			continue
		}
		caught = append(caught, test+where)
		if o.show {
			fmt.Fprintln(&shown, r.output)
		}
	}
	if o.random == 0 {
		if r := try(ctx, o, t.target, t.binary, id); r.killed {
			caught = append(caught, "all: "+r.by)
		}
	}
	return fmt.Sprintf("%s%s: %q caught by %s\n", &shown, t.path, s.Name, strings.Join(caught, "; ")), ok
}

// tryCertain plays a test several times with a seeded bug, each of which must fail, and as often without one, which it must pass.
func tryCertain(ctx context.Context, o options, t place, id int, flags []string) (r result, where string) {
	flags = slices.Concat(fully, flags)
	for i := range rounds {
		if r = try(ctx, o, t.target, t.binary, id, flags...); !r.killed {
			return r, fmt.Sprintf(" (not in play %d of %d)", i+1, rounds)
		}
	}
	if original := try(ctx, o, t.target, t.binary, 0, append(flags, "-test.count", strconv.Itoa(rounds))...); original.killed {
		return result{output: original.output}, " (the original fails, too)"
	}
	return r, ""
}

// fully are the arguments of a test that must catch a seeded bug: what depends on the scheduler takes some rounds.
var fully = []string{"-test.short=false", "-test.failfast", "-test.v"}

// inFull gives a test the time for that.
func inFull(o options) options {
	o.patience *= 6
	return o
}

var failedSeed = regexp.MustCompile(`seed (\d+):`)

// tryRandom plays random histories with a seeded bug until one fails, and fails again, that the original passes, and says where that was.
// What the original fails, too, or fails only once, is a fault of the histories' bench. The known one is tried first, if it is not 0.
func tryRandom(ctx context.Context, o options, t place, id, known int) (r result, where string) {
	play := func(id, seed, histories, count int) result {
		return try(ctx, o, t.target, t.binary, id, slices.Concat(fully, []string{
			"-test.count", strconv.Itoa(count),
			"-seed", strconv.Itoa(seed), "-histories", strconv.Itoa(histories),
		})...)
	}
	faults := ""
	if known > 0 {
		if r, _ = tryCertain(ctx, o, t, id, []string{"-seed", strconv.Itoa(known), "-histories", "1"}); r.killed {
			return r, fmt.Sprintf(" (seed %d, which is known)", known)
		}
		faults = fmt.Sprintf(" (not at seed %d, where it was)", known)
	}
	for first := 1; first <= o.random; {
		if r = play(id, first, o.random-first+1, 1); !r.killed {
			break
		}
		match := failedSeed.FindStringSubmatch(r.output)
		if match == nil {
			return result{output: r.output}, fmt.Sprintf(" (from seed %d: %s, and it is not said at which seed)", first, r.by) + faults
		}
		seed, err := strconv.Atoi(match[1])
		if err != nil || seed < first {
			return result{output: r.output}, fmt.Sprintf(" (it failed at seed %s, which was not asked for)", match[1])
		}
		switch {
		case !play(id, seed, 1, rounds).killed:
			faults += fmt.Sprintf(" (it fails only once at seed %d)", seed)
		case play(0, seed, 1, rounds).killed:
			faults += fmt.Sprintf(" (the original fails at seed %d, too)", seed)
		default:
			return r, fmt.Sprintf(" (seed %d, after %d histories)", seed, seed) + faults
		}
		first = seed + 1
	}
	return result{output: r.output}, fmt.Sprintf(" (after %d histories)", o.random) + faults
}

// rounds are how often the original has to pass, and in how many the bug may fail again: goroutines run in any order.
const rounds = 3

// changed returns the texts of the changed files, by their paths. dir is the package's folder.
func (s seed) changed(dir string) (texts map[string]string, err error) {
	texts = map[string]string{}
	for _, r := range append([]replacement{s.replacement}, s.Also...) {
		path := filepath.Join(dir, r.File)
		if texts[path] == "" {
			text, err := os.ReadFile(path)
			if err != nil {
				return nil, fmt.Errorf("field file: %w", err)
			}
			texts[path] = string(text)
		}
		if n := strings.Count(texts[path], r.Old); n != 1 {
			return nil, fmt.Errorf("field old: found %d times in %s, want once", n, r.File)
		}
		texts[path] = strings.Replace(texts[path], r.Old, r.New, 1)
	}
	return texts, nil
}
