// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package build

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// fakeCompiler writes a file in place of a program and counts the calls.
type fakeCompiler struct {
	mu     sync.Mutex
	built  []string
	failOn string
}

func (f *fakeCompiler) compile(_ context.Context, dir, output string, _ []string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		return fmt.Errorf("the module is not there: %w", err)
	}
	name := filepath.Base(output)
	if name == f.failOn {
		return errors.New("exit status 1\nfoo.go:1: undefined: bar")
	}
	f.built = append(f.built, name)
	return os.WriteFile(output, []byte("program"), 0o755)
}

func TestEnsureBuildsEachProgramOnce(t *testing.T) {
	cache := t.TempDir()
	compiler := &fakeCompiler{}
	var progress strings.Builder
	binaries, err := ensure(t.Context(), cache, &progress, compiler.compile, []Set{ControlPlane})
	if err != nil {
		t.Fatal(err)
	}
	controlPlane := []string{"tether", "etcd", "kube-apiserver", "kube-controller-manager", "kubectl"}
	if diff := cmp.Diff(controlPlane, compiler.built); diff != "" {
		t.Errorf("built (-want +got):\n%s", diff)
	}
	for _, path := range []string{
		binaries.Tether(), binaries.Etcd(), binaries.KubeAPIServer(), binaries.KubeControllerManager(), binaries.Kubectl(),
	} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if !strings.Contains(progress.String(), "building kube-apiserver 1.37.1 (3/5) ...\nbuilt kube-apiserver 1.37.1 (3/5) in 0s\n") {
		t.Errorf("progress does not tell of kube-apiserver:\n%s", &progress)
	}

	compiler.built = nil
	if _, err := ensure(t.Context(), cache, &progress, compiler.compile, []Set{ControlPlane, StockScheduler}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"kube-scheduler"}, compiler.built); diff != "" {
		t.Errorf("built the second time (-want +got):\n%s", diff)
	}
}

func TestTwoAtOnceDoNotBuildTwice(t *testing.T) {
	cache := t.TempDir()
	compiler := &fakeCompiler{}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := ensure(t.Context(), cache, new(strings.Builder), compiler.compile, []Set{Node}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	want := []string{"kubelet", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "ptp", "loopback", "host-local"}
	if diff := cmp.Diff(want, compiler.built); diff != "" {
		t.Errorf("built (-want +got):\n%s", diff)
	}
}

func TestAFailedBuildNamesTheProgramAndKeepsTheOthers(t *testing.T) {
	cache := t.TempDir()
	compiler := &fakeCompiler{failOn: "kube-apiserver"}
	_, err := ensure(t.Context(), cache, new(strings.Builder), compiler.compile, []Set{ControlPlane})
	if err == nil || !strings.Contains(err.Error(), "building kube-apiserver: exit status 1\nfoo.go:1: undefined: bar") {
		t.Errorf("got error %v, want it to name kube-apiserver and show the compiler's output", err)
	}
	leftovers, err := filepath.Glob(filepath.Join(cache, "*", "building-*"))
	if err != nil || len(leftovers) > 0 {
		t.Errorf("left temporary folders %v (error %v)", leftovers, err)
	}

	compiler.failOn, compiler.built = "", nil
	if _, err := ensure(t.Context(), cache, new(strings.Builder), compiler.compile, []Set{ControlPlane}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"kube-apiserver", "kube-controller-manager", "kubectl"}, compiler.built); diff != "" {
		t.Errorf("built after the failure (-want +got):\n%s", diff)
	}
}

func TestStoresThatNobodyUsesAreRemoved(t *testing.T) {
	cache := t.TempDir()
	long := time.Now().Add(-2 * unusedLife)
	unused := filepath.Join(cache, "kubernetes-v1.30.0-0123456789ab")
	recent := filepath.Join(cache, "kubernetes-v1.36.0-0123456789ab")
	other := filepath.Join(cache, "something-else")
	for _, dir := range []string{unused, recent, other} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(dir, long, long); err != nil {
			t.Fatal(err)
		}
	}
	if err := (&store{dir: recent}).markUsed(); err != nil {
		t.Fatal(err)
	}
	binaries, err := ensure(t.Context(), cache, new(strings.Builder), (&fakeCompiler{}).compile, []Set{StockScheduler})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, dir := range []string{unused, recent, other, binaries.KubernetesDir} {
		_, err := os.Stat(dir)
		got[dir] = err == nil
	}
	want := map[string]bool{unused: false, recent: true, other: true, binaries.KubernetesDir: true}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("folders that exist (-want +got):\n%s", diff)
	}
}

func TestWaitingForAnotherBuildEndsWithTheContext(t *testing.T) {
	cache := t.TempDir()
	s, err := newStore(cache, kubernetesModule)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	unlock, err := lock(t.Context(), filepath.Join(s.dir, "lock"), func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	waiting := writerFunc(func(line []byte) (int, error) {
		if strings.HasPrefix(string(line), "waiting for another process") {
			cancel()
		}
		return len(line), nil
	})
	_, err = ensure(ctx, cache, waiting, (&fakeCompiler{}).compile, []Set{ControlPlane})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v, want %v", err, context.Canceled)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestTheKeyCoversSourcesAndFlags(t *testing.T) {
	key := func(m module) string {
		t.Helper()
		k, err := m.key()
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	before := key(containerdModule)
	if again := key(containerdModule); again != before {
		t.Errorf("key is %s and then %s for the same module", before, again)
	}
	changed := containerdModule
	changed.programs = append([]program{}, containerdModule.programs...)
	changed.programs[0].tags += ",more"
	if key(changed) == before {
		t.Error("another build tag gives the same key")
	}
	changed = containerdModule
	data, err := fs.ReadFile(containerdModule.sources, "go.mod.in")
	if err != nil {
		t.Fatal(err)
	}
	changed.sources = fstest.MapFS{
		"go.mod.in": {Data: data},
		"go.sum.in": {Data: []byte("other sums")},
	}
	if key(changed) == before {
		t.Error("other sources give the same key")
	}
}

func TestEveryProgramHasAVersionAndItsStamp(t *testing.T) {
	tests := map[string]string{
		"kube-apiserver": "-X k8s.io/component-base/version.gitVersion=v1.37.1 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37 ",
		"containerd":     "-X github.com/containerd/containerd/v2/version.Version=v2.4.2",
		"ptp":            "-X github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion=v1.9.1",
	}
	for _, m := range []module{kubernetesModule, containerdModule} {
		for _, p := range m.programs {
			args, err := m.arguments(p)
			if err != nil {
				t.Errorf("%s: %v", p.name, err)
			}
			if want := tests[p.name]; !strings.Contains(strings.Join(args, " "), want) {
				t.Errorf("%s is built with %q, want %q among them", p.name, args, want)
			}
			if p.from != "" && !strings.Contains(m.title(p), ".") {
				t.Errorf("%s has no version in its title %q", p.name, m.title(p))
			}
		}
	}
}

func TestAMissingGoCommandIsExplained(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	t.Setenv("GOROOT", "")
	err := goBuild(t.Context(), t.TempDir(), "out", []string{"./etcd"})
	if err == nil || !strings.Contains(err.Error(), "need the go command") {
		t.Errorf("got error %v, want it to say that the go command is needed", err)
	}
}

func TestGoBuildShowsTheCompilersOutput(t *testing.T) {
	dir := t.TempDir()
	for name, data := range map[string]string{"go.mod": "module example\n\ngo 1.26.0\n", "main.go": "package main\n\nfunc main() { undefined() }\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	err := goBuild(t.Context(), dir, filepath.Join(dir, "out"), []string{"."})
	if err == nil || !strings.Contains(err.Error(), "undefined: undefined") {
		t.Errorf("got error %v, want the compiler's message in it", err)
	}
}
