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

// trySeeds puts in the seeded bugs one by one and lists all tests that fail.
func trySeeds(ctx context.Context, out io.Writer, o options, t *target, n notes, work string) (ok bool, err error) {
	ok = true
	overlays := make([]string, len(n.Seeds))
	for i, s := range n.Seeds { // all before the first is tried, which takes time
		folder := filepath.Join(work, fmt.Sprint(i))
		if err := os.Mkdir(folder, 0o700); err != nil {
			return false, err
		}
		if overlays[i], err = s.overlay(t, folder); err != nil {
			return false, fmt.Errorf("seed %q: %w", s.Name, err)
		}
	}
	original := filepath.Join(work, "original")
	if o.random > 0 {
		if err := build(ctx, t, "", original); err != nil {
			return false, err
		}
	}
	for i, s := range n.Seeds {
		if !strings.Contains(s.Name, o.only) {
			continue
		}
		folder, overlay := filepath.Dir(overlays[i]), overlays[i]
		binary := filepath.Join(folder, "test")
		if err := build(ctx, t, overlay, binary); err != nil {
			return false, fmt.Errorf("seed %q: %w", s.Name, err)
		}
		elsewhere, binaryElsewhere := t, binary // where the tests are that must catch it
		if s.In != "" {
			dir := filepath.Join(t.dir, s.In)
			elsewhere, binaryElsewhere = &target{dir: dir, path: dir}, filepath.Join(folder, "elsewhere")
			if err := build(ctx, elsewhere, overlay, binaryElsewhere); err != nil {
				return false, fmt.Errorf("seed %q: %w", s.Name, err)
			}
		}
		var caught []string
		for _, test := range append(strings.Fields(s.CaughtBy), "") {
			one := o
			one.run = "^" + test + "$"
			var r result
			where := ""
			switch {
			case test == "":
				one.run = o.run
				r = try(ctx, one, t, binary, 0)
			case o.random > 0 && s.NoHistory == "":
				r, where = tryRandom(ctx, inFull(one), t, binary, original, s.History)
			default:
				r = try(ctx, inFull(one), elsewhere, binaryElsewhere, 0, fully...)
			}
			switch {
			case test == "" && r.killed:
				caught = append(caught, "all: "+r.by)
			case test != "" && r.killed:
				caught = append(caught, test+where)
				if o.show {
					fmt.Fprintln(out, r.output)
				}
			case test != "":
				ok = false
				caught = append(caught, "NOT by "+test+where)
			}
		}
		fmt.Fprintf(out, "%s: %q caught by %s\n", t.path, s.Name, strings.Join(caught, "; "))
		if err := ctx.Err(); err != nil {
			return false, err
		}
	}
	return ok, nil
}

// fully are the arguments of a test that must catch a seeded bug: what depends on the scheduler takes some rounds.
var fully = []string{"-test.short=false", "-test.failfast", "-test.v"}

// inFull gives a test the time for that.
func inFull(o options) options {
	o.patience *= 6
	return o
}

var failedSeed = regexp.MustCompile(`seed (\d+):`)

// tryRandom plays random histories with a seeded bug until one fails, and fails again, that the original passes, and says where that was. What
// the original fails, too, or fails only once, is a fault of the histories' bench. The known one is tried first, if it is not 0.
func tryRandom(ctx context.Context, o options, t *target, binary, original string, known int) (r result, where string) {
	play := func(binary string, seed, histories, count int) result {
		return try(ctx, o, t, binary, 0, slices.Concat(fully, []string{
			"-test.count", strconv.Itoa(count),
			"-seed", strconv.Itoa(seed), "-histories", strconv.Itoa(histories),
		})...)
	}
	faults := ""
	if known > 0 {
		if r = play(binary, known, 1, rounds); r.killed && !play(original, known, 1, rounds).killed {
			return r, fmt.Sprintf(" (seed %d, which is known)", known)
		}
		faults = fmt.Sprintf(" (not at seed %d, where it was)", known)
	}
	for first := 1; first <= o.random; {
		if r = play(binary, first, o.random-first+1, 1); !r.killed {
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
		case !play(binary, seed, 1, rounds).killed:
			faults += fmt.Sprintf(" (it fails only once at seed %d)", seed)
		case play(original, seed, 1, rounds).killed:
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

// overlay writes the changed files, and go's overlay for them.
func (s seed) overlay(t *target, folder string) (string, error) {
	texts := map[string]string{} // by the file's path
	for _, r := range append([]replacement{s.replacement}, s.Also...) {
		path := filepath.Join(t.dir, r.File)
		if texts[path] == "" {
			text, err := os.ReadFile(path)
			if err != nil {
				return "", fmt.Errorf("field file: %w", err)
			}
			texts[path] = string(text)
		}
		if n := strings.Count(texts[path], r.Old); n != 1 {
			return "", fmt.Errorf("field old: found %d times in %s, want once", n, r.File)
		}
		texts[path] = strings.Replace(texts[path], r.Old, r.New, 1)
	}
	replace := map[string]string{}
	for path, text := range texts {
		replace[path] = filepath.Join(folder, fmt.Sprintf("%d-%s", len(replace), filepath.Base(path)))
		if err := os.WriteFile(replace[path], []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	return writeOverlay(folder, replace)
}
