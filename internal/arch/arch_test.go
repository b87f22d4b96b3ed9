// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "stowage.dev/stowage/"

// room is one row of the table in docs/design/README.md. A package belongs to the
// room with the longest matching path.
type room struct {
	path string
	// imports are the rooms that it imports from, its own not included.
	// Dependencies point from the edges (cmd, test) to the pure core.
	imports []string
}

// forbidden lists imports from outside the module that a room must not have,
// by prefix. Only pkg/plugins, cmd/scheduler and the tests may know the
// scheduler framework; the pure core knows no client, informer or clock.
var forbidden = map[string][]string{
	"pkg/inventory":        {"k8s.io/client-go", "k8s.io/kubernetes", "k8s.io/utils/clock", "k8s.io/kube-scheduler"},
	"pkg/usage":            {"k8s.io/client-go", "k8s.io/kubernetes", "k8s.io/utils/clock", "k8s.io/kube-scheduler"},
	"pkg/allocator":        {"k8s.io/client-go", "k8s.io/kubernetes", "k8s.io/utils/clock", "k8s.io/kube-scheduler", "time"},
	"pkg/audit":            {"k8s.io/client-go", "k8s.io/kubernetes", "k8s.io/utils/clock", "k8s.io/kube-scheduler"},
	"pkg/wakeup":           {"k8s.io/client-go", "k8s.io/kubernetes", "k8s.io/utils/clock", "k8s.io/kube-scheduler"},
	"pkg/topology":         {"k8s.io/", "time"},
	"pkg/tracker":          {"k8s.io/kubernetes", "k8s.io/kube-scheduler"},
	"pkg/fence":            {"k8s.io/kubernetes", "k8s.io/kube-scheduler", "k8s.io/client-go"},
	"pkg/agent":            {"k8s.io/kubernetes", "k8s.io/kube-scheduler"},
	"pkg/nvmlsim":          {"k8s.io/"},
	"pkg/draclient":        {"k8s.io/kubernetes", "k8s.io/kube-scheduler"},
	"pkg/policies":         {"k8s.io/kubernetes", "k8s.io/kube-scheduler"},
	"cmd/node-agent":       {"k8s.io/kubernetes", "k8s.io/kube-scheduler"},
	"cmd/nvmlsimctl":       {"k8s.io/"},
	"internal/":            {"k8s.io/kubernetes"},
	"test/chaos":           {"k8s.io/kubernetes"},
	"test/scale":           {"k8s.io/kubernetes"},
	"pkg/inventory/source": {"k8s.io/kubernetes", "k8s.io/kube-scheduler"},
}

// goPackage is the part of `go list -json` that the check reads.
type goPackage struct {
	ImportPath string
	Imports    []string
}

// Each package belongs to a room, which imports from the rooms that the design says, from all of them, and from no others.
func TestImportsKeepTheOrderOfTheRooms(t *testing.T) {
	rooms := readRooms(t)
	used, has := map[[2]string]bool{}, map[string]bool{}
	for _, pkg := range listPackages(t) {
		path := strings.TrimPrefix(pkg.ImportPath, module)
		home, ok := roomOf(rooms, path)
		if !ok {
			t.Errorf("%s belongs to no room of docs/design/README.md: add it there", path)
			continue
		}
		has[home.path] = true
		for _, imported := range pkg.Imports {
			if !strings.HasPrefix(imported, module) {
				for _, prefix := range forbiddenIn(path) {
					if imported == prefix || strings.HasPrefix(imported, strings.TrimSuffix(prefix, "/")+"/") {
						t.Errorf("%s imports %s: this room must not know it", path, imported)
					}
				}
				continue
			}
			target, ok := roomOf(rooms, strings.TrimPrefix(imported, module))
			if !ok || target.path == home.path {
				continue
			}
			used[[2]string{home.path, target.path}] = true
			if !slices.Contains(home.imports, target.path) {
				t.Errorf("%s imports %s: room %s may only import %v", path, strings.TrimPrefix(imported, module), home.path, home.imports)
			}
		}
	}
	for _, room := range rooms {
		if !has[room.path] {
			t.Errorf("docs/design/README.md has a room %s, and no package belongs to it", room.path)
		}
		for _, target := range room.imports {
			if !used[[2]string{room.path, target}] {
				t.Errorf("docs/design/README.md lets %s import %s, and it does not", room.path, target)
			}
		}
	}
}

// readRooms reads the table of rooms from the design.
func readRooms(t *testing.T) (rooms []room) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("..", "..", "docs", "design", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	rooms, err = parseRooms(string(content))
	if err != nil {
		t.Fatalf("docs/design/README.md: %v", err)
	}
	return rooms
}

func parseRooms(design string) (rooms []room, err error) {
	const columns = 4
	name := regexp.MustCompile("^`([\\w/-]+)`$")
	_, table, _ := strings.Cut(design, "\n## Rooms\n")
	table, _, _ = strings.Cut(table, "\n## ")
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != columns {
			return nil, fmt.Errorf("row %q has %d cells, want %d", line, len(cells), columns)
		}
		var names []string
		for cell := range strings.SplitSeq(cells[0]+","+cells[columns-1], ",") {
			if cell = strings.TrimSpace(cell); cell == "" {
				continue
			}
			match := name.FindStringSubmatch(cell)
			if match == nil {
				return nil, fmt.Errorf("row %q: %q is not the name of a room", line, cell)
			}
			names = append(names, match[1])
		}
		if slices.ContainsFunc(rooms, func(room room) bool { return room.path == names[0] }) {
			return nil, fmt.Errorf("room %s has two rows", names[0])
		}
		rooms = append(rooms, room{path: names[0], imports: names[1:]})
	}
	if len(rooms) < 10 {
		return nil, fmt.Errorf("the table of rooms has only %d rows: the check would prove nothing", len(rooms))
	}
	return rooms, nil
}

// TestSchedulerMainIsThin keeps the binary's main to what it is for: everything
// else has a room with tests.
func TestSchedulerMainIsThin(t *testing.T) {
	const limit = 60
	content, err := os.ReadFile(filepath.Join("..", "..", "cmd", "scheduler", "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	if lines := bytes.Count(content, []byte("\n")); lines > limit {
		t.Errorf("cmd/scheduler/main.go has %d lines, at most %d are allowed", lines, limit)
	}
}

func roomOf(rooms []room, path string) (room, bool) {
	var best room
	for _, candidate := range rooms {
		if (path == candidate.path || strings.HasPrefix(path, candidate.path+"/")) && len(candidate.path) > len(best.path) {
			best = candidate
		}
	}
	return best, best.path != ""
}

func forbiddenIn(path string) []string {
	best := ""
	for prefix := range forbidden {
		if (path == prefix || strings.HasPrefix(path, strings.TrimSuffix(prefix, "/")+"/")) && len(prefix) > len(best) {
			best = prefix
		}
	}
	return forbidden[best]
}

func listPackages(t *testing.T) []goPackage {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-e", "-tags", "e2e", "-json=ImportPath,Imports", module+"...")
	cmd.Stderr = os.Stderr
	output, err := cmd.Output()
	if err != nil {
		t.Fatalf("listing the module's packages: %v", err)
	}
	var pkgs []goPackage
	decoder := json.NewDecoder(bytes.NewReader(output))
	for {
		var pkg goPackage
		err := decoder.Decode(&pkg)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("reading the output of go list: %v", err)
		}
		pkgs = append(pkgs, pkg)
	}
	if len(pkgs) < 10 {
		t.Fatalf("go list found only %d packages: the check would prove nothing", len(pkgs))
	}
	return pkgs
}

func TestTheTableOfRoomsIsRead(t *testing.T) {
	row := func(n int) string { return fmt.Sprintf("| `pkg/r%d` | a | b | `pkg/a`, `pkg/b` |\n", n) }
	var ten string
	for n := range 10 {
		ten += row(n)
	}
	tests := map[string]struct{ table, want string }{
		"good":               {table: ten},
		"too few rows":       {table: row(1), want: "the table of rooms has only 1 rows"},
		"a room twice":       {table: ten + row(3), want: "room pkg/r3 has two rows"},
		"a cell is missing":  {table: ten + "| `pkg/x` | a | b |\n", want: "has 3 cells, want 4"},
		"two rooms in a row": {table: ten + "| `pkg/x` `pkg/y` | a | b | |\n", want: "\"`pkg/x` `pkg/y`\" is not the name of a room"},
		"prose for imports":  {table: ten + "| `pkg/x` | a | b | anything |\n", want: `"anything" is not the name of a room`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			rooms, err := parseRooms("# Design\n\n## Rooms\n\n| room | a | b | imports |\n|---|---|---|---|\n" + tc.table + "\n## Later\n\n| `pkg/z` | a |\n")
			switch {
			case tc.want == "" && err != nil:
				t.Error(err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("error %v, want %q", err, tc.want)
			case tc.want == "" && (len(rooms) != 10 || rooms[3].path != "pkg/r3" || !slices.Equal(rooms[3].imports, []string{"pkg/a", "pkg/b"})):
				t.Errorf("rooms %v", rooms)
			}
		})
	}
}
