// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package enclosure_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"stowage.dev/stowage/internal/localcluster/image"
	"stowage.dev/stowage/internal/localcluster/node/enclosure"
)

// started is an enclosure with one folder mounted at a place that the machine does not have.
type started struct {
	*enclosure.Enclosure
	binary, dir, source, target, cgroup string
}

func prepare(t *testing.T) started {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a mount namespace and a cgroup")
	}
	dir := t.TempDir()
	s := started{
		binary: filepath.Join(dir, "janitor"),
		dir:    dir,
		source: filepath.Join(dir, "source"),
		target: filepath.Join(dir, "missing", "target"),
		cgroup: fmt.Sprintf("/stowage-test-%d", os.Getpid()),
	}
	if err := image.Compile(t.Context(), "stowage.dev/stowage/internal/localcluster/node/enclosure/janitor", s.binary); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(s.source, 0o755); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s started) spec() enclosure.Spec {
	return enclosure.Spec{Cgroup: s.cgroup, Binds: []enclosure.Bind{{Source: s.source, Target: s.target}}}
}

func start(t *testing.T) started {
	t.Helper()
	s := prepare(t)
	var err error
	if s.Enclosure, err = enclosure.Start(t.Context(), s.binary, s.dir, s.spec()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestWhatIsMountedInsideDoesNotShowOutside(t *testing.T) {
	s := start(t)
	path, args := s.Wrap("/bin/sh", "-c", "echo inside > "+s.target+"/file")
	if out, err := exec.Command(path, args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if _, err := os.Stat(filepath.Join(s.target, "file")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stat of the mount point from outside: got %v, want that the file does not exist", err)
	}
	for _, path := range []string{filepath.Join(s.source, "file"), filepath.Join(s.Root(), s.target, "file")} {
		if content, err := os.ReadFile(path); string(content) != "inside\n" {
			t.Errorf("%s: got %q, %v", path, content, err)
		}
	}
}

func TestACommandInsideKeepsItsProcessIdAndWorkingFolder(t *testing.T) {
	s := start(t)
	path, args := s.Wrap("/bin/sh", "-c", "echo $$ $PWD")
	cmd := exec.Command(path, args...)
	cmd.Dir = s.source
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("%d %s\n", cmd.Process.Pid, s.source); string(out) != want {
		t.Errorf("got %q, want %q", out, want)
	}
}

func TestStopLeavesNoProcessMountPointOrCgroup(t *testing.T) {
	s := start(t)
	// One process in the mount namespace, orphaned and deaf to SIGTERM as a shim may be, and one in the cgroup only, as a container is.
	inside, args := s.Wrap("/bin/sh", "-c", `trap "" TERM; sleep 1000 >/dev/null 2>&1 & echo $!`)
	out, err := exec.Command(inside, args...).Output()
	if err != nil {
		t.Fatal(err)
	}
	orphan := strings.TrimSpace(string(out))
	// The kubelet mounts its root folder over itself.
	inside, args = s.Wrap("/bin/sh", "-c", fmt.Sprintf("mount --bind %s %s", s.target, s.target))
	if out, err := exec.Command(inside, args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	contained := exec.Command("sleep", "1000")
	if err := contained.Start(); err != nil {
		t.Fatal(err)
	}
	hierarchies, err := enclosure.Hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	for _, root := range hierarchies { // as runc does, also where the enclosure itself has made none
		if err := os.MkdirAll(filepath.Join(root, s.cgroup, "pod"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(hierarchies[0], s.cgroup, "pod", "cgroup.procs"), []byte(fmt.Sprint(contained.Process.Pid)), 0); err != nil {
		t.Fatal(err)
	}
	pids, err := s.Processes()
	if err != nil || !slices.Contains(pids, contained.Process.Pid) || len(pids) != 2 {
		t.Fatalf("processes inside: got %v, %v; want %s and %d", pids, err, orphan, contained.Process.Pid)
	}
	waited := make(chan error, 1)
	go func() { waited <- contained.Wait() }()

	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-waited:
	case <-time.After(time.Minute):
		t.Error("the process in the cgroup still runs")
	}
	gone(t, "/proc/"+orphan+"/exe") // a zombie has none
	gone(t, filepath.Dir(s.target))
	for _, root := range hierarchies {
		gone(t, filepath.Join(root, s.cgroup))
	}
}

// A folder that is removed outside takes what is mounted on it away inside.
func TestAnEnclosureKeepsItsMountsWhenTheOneThatMadeTheMountPointEnds(t *testing.T) {
	first := start(t)
	second := prepare(t)
	second.target, second.cgroup = first.target, second.cgroup+"-second"
	var err error
	if second.Enclosure, err = enclosure.Start(t.Context(), second.binary, second.dir, second.spec()); err != nil {
		t.Fatal(err)
	}
	if err := first.Stop(); err != nil {
		t.Error(err)
	}
	path, args := second.Wrap("/bin/sh", "-c", "echo inside > "+second.target+"/file")
	if out, err := exec.Command(path, args...).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if content, err := os.ReadFile(filepath.Join(second.source, "file")); string(content) != "inside\n" {
		t.Errorf("the folder mounted in the second enclosure: got %q, %v", content, err)
	}
	if err := second.Stop(); err != nil {
		t.Error(err)
	}
	gone(t, filepath.Dir(second.target))
	left, err := filepath.Glob("/run/stowage-mount-point-*" + filepath.Base(first.dir) + "-missing-target")
	if err != nil || len(left) > 0 {
		t.Errorf("files about the mount point: got %v, %v, want none", left, err)
	}
}

// The test program starts itself as a process that makes an enclosure and then is killed.
func TestTheJanitorCleansUpAfterAKilledParent(t *testing.T) {
	s := prepare(t)
	parent := exec.Command(os.Args[0], "-test.run=^TestHelperThatMakesAnEnclosureAndWaits$")
	parent.Env = append(os.Environ(), "STOWAGE_TEST_ENCLOSURE="+strings.Join([]string{s.binary, s.dir, s.source, s.target, s.cgroup}, ":"))
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	var sleeper int
	if _, err := fmt.Fscanf(out, "sleeper %d\n", &sleeper); err != nil {
		t.Fatal(err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	hierarchies, err := enclosure.Hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	eventuallyGone(t, fmt.Sprintf("/proc/%d/exe", sleeper))
	eventuallyGone(t, filepath.Dir(s.target))
	for _, root := range hierarchies {
		eventuallyGone(t, filepath.Join(root, s.cgroup))
	}
}

func TestHelperThatMakesAnEnclosureAndWaits(t *testing.T) {
	given := os.Getenv("STOWAGE_TEST_ENCLOSURE")
	if given == "" {
		t.Skip("only for TestTheJanitorCleansUpAfterAKilledParent")
	}
	parts := strings.Split(given, ":")
	s := started{binary: parts[0], dir: parts[1], source: parts[2], target: parts[3], cgroup: parts[4]}
	e, err := enclosure.Start(context.Background(), s.binary, s.dir, s.spec())
	if err != nil {
		t.Fatal(err)
	}
	path, args := e.Wrap("/bin/sleep", "1000")
	sleeper := exec.Command(path, args...)
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	// Until it is inside, the janitor does not know it.
	for pids := []int(nil); !slices.Contains(pids, sleeper.Process.Pid); {
		if pids, err = e.Processes(); err != nil {
			t.Fatal(err)
		}
	}
	fmt.Printf("sleeper %d\n", sleeper.Process.Pid)
	select {}
}

func TestAnEnclosureThatCannotBeMadeLeavesNothing(t *testing.T) {
	s := prepare(t)
	spec := s.spec()
	spec.Binds = append(spec.Binds, enclosure.Bind{Source: filepath.Join(s.dir, "no-such-folder"), Target: filepath.Join(s.dir, "other")})
	_, err := enclosure.Start(t.Context(), s.binary, s.dir, spec)
	if err == nil || !strings.Contains(err.Error(), "no-such-folder") {
		t.Fatalf("got error %v, want one that names the missing folder", err)
	}
	gone(t, filepath.Dir(s.target))
	gone(t, filepath.Join(s.dir, "other"))
}

func TestACgroupThatIsNotOursIsRefused(t *testing.T) {
	for _, cgroup := range []string{"", "/", "/kubepods", "/stowage-a/../..", "stowage-a"} {
		file := filepath.Join(t.TempDir(), "spec.json")
		if err := (enclosure.Spec{Cgroup: cgroup}).WriteFile(file); err != nil {
			t.Fatal(err)
		}
		if _, err := enclosure.ReadSpec(file); err == nil {
			t.Errorf("cgroup %q was accepted", cgroup)
		}
	}
}

func gone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is left (stat says %v)", path, err)
	}
}

func eventuallyGone(t *testing.T, path string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
	gone(t, path)
}
