package arch

import (
	"bytes"
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

const module = "stowage.dev/stowage/"

// room is one row of the table in docs/design/README.md. A package belongs to the
// room with the longest matching path.
type room struct {
	path string
	// may lists the rooms that it may import from, its own always included.
	// Dependencies point from the edges (cmd, test) to the pure core.
	may []string
}

// rooms is the import order. A room that is missing here fails the test: a new
// room is a decision, taken in docs/design/README.md first.
var rooms = []room{
	{path: "cmd/scheduler", may: []string{"internal/version", "pkg/plugins", "pkg/policies"}},
	{path: "cmd/node-agent", may: []string{"internal/version", "pkg/agent", "pkg/draclient", "pkg/nvmlsim", "pkg/policies"}},
	{path: "cmd/nvmlsimctl", may: []string{"pkg/nvmlsim"}},

	{path: "pkg/plugins", may: []string{"internal/sharded", "pkg/inventory", "pkg/tracker", "pkg/allocator", "pkg/usage", "pkg/fence", "pkg/audit", "pkg/policies", "pkg/wakeup"}},
	{path: "pkg/fence", may: []string{"pkg/inventory", "pkg/tracker", "pkg/usage"}},
	{path: "pkg/audit", may: []string{"pkg/inventory", "pkg/tracker", "pkg/usage"}},
	{path: "pkg/inventory/source", may: []string{"pkg/inventory"}},
	{path: "pkg/tracker", may: []string{"pkg/usage", "pkg/inventory/amount"}},
	{path: "pkg/wakeup", may: []string{"pkg/allocator", "pkg/inventory", "pkg/usage"}},
	{path: "pkg/allocator", may: []string{"pkg/inventory", "pkg/usage"}},
	{path: "pkg/inventory", may: []string{"internal/sharded", "pkg/inventory/amount"}},
	{path: "pkg/inventory/amount"},
	{path: "pkg/usage", may: []string{"internal/sharded", "pkg/inventory/amount"}},

	{path: "pkg/draclient"},
	{path: "pkg/policies"},
	{path: "pkg/agent/driver", may: []string{"pkg/agent"}},
	{path: "pkg/agent", may: []string{"pkg/nvmlsim", "pkg/inventory/amount"}},
	{path: "pkg/nvmlsim"},

	{path: "internal/hostile"},
	{path: "internal/localcluster", may: []string{"pkg/draclient"}},
	{path: "internal/arch"},
	{path: "internal/mutate"},
	{path: "internal/sharded"},
	{path: "internal/version"},
	{path: "internal/vulncheck"},

	{path: "test/lab", may: []string{"internal/localcluster"}},
	{path: "test/demo", may: []string{"internal/localcluster", "test/lab"}},
	{path: "test/e2e", may: []string{"internal/localcluster", "pkg/nvmlsim", "test/lab"}},
	{path: "test/integration", may: []string{"internal/hostile", "internal/localcluster", "pkg/plugins", "pkg/policies", "pkg/tracker"}},
	{path: "test/images"},
	{path: "test/gpu", may: []string{"pkg/agent"}},
	{path: "test/perf/fence", may: []string{"internal/localcluster"}},
	{path: "test/chaos", may: []string{"internal/localcluster"}},
	{path: "test/liveness", may: []string{"pkg/plugins", "test/chaos"}},
	{path: "test/scale", may: []string{"internal/localcluster", "test/chaos", "test/lab"}},
	{path: "test/perf/allocator", may: []string{"pkg/allocator", "pkg/inventory", "pkg/usage"}},
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

func TestImportsKeepTheOrderOfTheRooms(t *testing.T) {
	for _, pkg := range listPackages(t) {
		path := strings.TrimPrefix(pkg.ImportPath, module)
		home, ok := roomOf(path)
		if !ok {
			t.Errorf("%s belongs to no room of docs/design/README.md: add it there and here", path)
			continue
		}
		for _, imported := range pkg.Imports {
			if !strings.HasPrefix(imported, module) {
				for _, prefix := range forbiddenIn(path) {
					if imported == prefix || strings.HasPrefix(imported, strings.TrimSuffix(prefix, "/")+"/") {
						t.Errorf("%s imports %s: this room must not know it", path, imported)
					}
				}
				continue
			}
			target, ok := roomOf(strings.TrimPrefix(imported, module))
			if !ok || target.path == home.path {
				continue
			}
			if !slices.ContainsFunc(home.may, func(may string) bool {
				return target.path == may || strings.HasPrefix(target.path, may+"/")
			}) {
				t.Errorf("%s imports %s: room %s may only import %v", path, strings.TrimPrefix(imported, module), home.path, home.may)
			}
		}
	}
}

// The design's table has each room, or the folder that it is in, and no room that is gone.
func TestTheDesignHasATableOfTheRooms(t *testing.T) {
	content, err := os.ReadFile(filepath.Join("..", "..", "docs", "design", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(content), "\n## Rooms\n")
	table, _, _ = strings.Cut(table, "\n## ")
	var rows []string
	for line := range strings.Lines(table) {
		if cells := strings.Split(line, "|"); len(cells) > 2 {
			for _, match := range regexp.MustCompile("`([\\w/-]+?)(?:/…)?`").FindAllStringSubmatch(cells[1], -1) {
				rows = append(rows, match[1])
			}
		}
	}
	within := func(path, folder string) bool { return path == folder || strings.HasPrefix(path, folder+"/") }
	for _, room := range rooms {
		if !slices.ContainsFunc(rows, func(row string) bool { return within(room.path, row) }) {
			t.Errorf("room %s is not in the table of docs/design/README.md", room.path)
		}
	}
	for _, row := range rows {
		if _, ok := roomOf(row); !ok && !slices.ContainsFunc(rooms, func(room room) bool { return within(room.path, row) }) {
			t.Errorf("docs/design/README.md has a room %s, which the test does not know", row)
		}
	}
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

func roomOf(path string) (room, bool) {
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
