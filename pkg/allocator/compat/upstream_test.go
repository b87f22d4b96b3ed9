// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	upstreamModule = "k8s.io/dynamic-resource-allocation"
	// wantCases is the number of cases in upstream's v0.37.1: 275 of its allocator, 4 that interrupt it and 4 about
	// its order.
	wantCases = 283
)

// TestUpstreamsOwnCasesPass runs the cases that upstream tests its allocator with against ours. They are taken from
// the module cache: an internal package can be imported only from within its own module, so the module is copied
// to a temporary folder, one test file is added there, and that copy takes the module's place in a temporary
// go.mod. Ten cases also count the steps of upstream's own search: what they say about the result is kept, the
// count is taken out of the copy.
func TestUpstreamsOwnCasesPass(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles upstream's cases, which takes a while")
	}
	temp := t.TempDir()
	copyModule(t, filepath.Join(temp, "module"))
	modfile := writeModfile(t, temp)
	results := runCases(t, modfile)

	passed := 0
	for _, result := range results {
		if result.action == "pass" {
			passed++
			continue
		}
		t.Run(result.name, func(t *testing.T) { t.Errorf("%s:\n%s", result.action, result.output) })
	}
	t.Logf("upstream's cases: %d passed, %d did not", passed, len(results)-passed)
	if len(results) != wantCases {
		t.Errorf("%d cases ran, want %d", len(results), wantCases)
	}
}

// copyModule copies the upstream module and adds our test file.
func copyModule(t *testing.T, to string) {
	t.Helper()
	from := goTool(t, "list", "-m", "-f", "{{.Dir}}", upstreamModule)
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatalf("copying %s: %v", upstreamModule, err)
	}
	folder := filepath.Join(to, "structured", "stowage")
	stripCounts(t, filepath.Join(to, "structured", "internal", "allocatortesting", "allocator_testing.go"))
	cases, err := os.ReadFile(filepath.Join("testdata", "cases", "cases_test.go.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "cases_test.go"), cases, 0o644); err != nil {
		t.Fatal(err)
	}
}

// stripCounts removes the expected numbers of steps from upstream's cases, which would otherwise be skipped.
func stripCounts(t *testing.T, file string) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	counts := regexp.MustCompile(`(?m)^\s*expectNumAllocateOneInvocations:\s*\d+,\n`)
	if n := len(counts.FindAll(content, -1)); n == 0 {
		t.Fatalf("%s expects no numbers of steps any more: this test needs a look", file)
	}
	if err := os.WriteFile(file, counts.ReplaceAll(content, nil), 0o644); err != nil {
		t.Fatal(err)
	}
}

// writeModfile writes a go.mod in which the copy takes the module's place.
func writeModfile(t *testing.T, folder string) string {
	t.Helper()
	ours := goTool(t, "list", "-m", "-f", "{{.GoMod}}")
	modfile := filepath.Join(folder, "stowage.mod")
	for from, to := range map[string]string{ours: modfile, strings.TrimSuffix(ours, ".mod") + ".sum": strings.TrimSuffix(modfile, ".mod") + ".sum"} {
		content, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	goTool(t, "mod", "edit", "-replace", upstreamModule+"="+filepath.Join(folder, "module"), modfile)
	return modfile
}

func goTool(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return strings.TrimSpace(string(output))
}

// caseResult is the outcome of one test that has no subtests.
type caseResult struct{ name, action, output string }

// runCases runs the copy's test with ours in it.
func runCases(t *testing.T, modfile string) []caseResult {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// Nothing is looked up in a network: what is needed is in the module cache, or the build fails.
	cmd := exec.CommandContext(ctx, "go", "test", "-mod=mod", "-modfile", modfile, "-count=1", "-json", "-timeout=5m",
		upstreamModule+"/structured/stowage")
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOPROXY=off", "GOWORK=off")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatalf("running upstream's cases: %v", err)
	}

	byName := make(map[string]*caseResult)
	var build strings.Builder
	for decoder := json.NewDecoder(bytes.NewReader(output)); ; {
		var event struct{ Action, Test, Output string }
		if err := decoder.Decode(&event); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("reading the output of go test: %v\n%s\n%s", err, output, stderr.String())
		}
		if event.Test == "" {
			build.WriteString(event.Output)
			continue
		}
		result := byName[event.Test]
		if result == nil {
			result = &caseResult{name: event.Test}
			byName[event.Test] = result
		}
		switch event.Action {
		case "output":
			if len(result.output) < 64<<10 {
				result.output += event.Output
			}
		case "pass", "fail", "skip":
			result.action = event.Action
		}
	}
	if len(byName) == 0 {
		t.Fatalf("no case ran: %v\n%s\n%s", err, build.String(), stderr.String())
	}
	var leaves []caseResult
	for name, result := range byName {
		isParent := false
		for other := range byName {
			isParent = isParent || strings.HasPrefix(other, name+"/")
		}
		if !isParent {
			leaves = append(leaves, *result)
		}
	}
	slices.SortFunc(leaves, func(a, b caseResult) int { return strings.Compare(a.name, b.name) })
	return leaves
}
