// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

var errReading = errors.New("this cannot be read now")

// readings are what an agent reads of GPUs, of the kernel, and of processes and daemons. One of them fails, the first is 1.
type readings struct {
	mu    sync.Mutex
	fails int
	names []string
}

func (r *readings) read(name string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.names = append(r.names, name); len(r.names) == r.fails {
		return fmt.Errorf("%s: %w", name, errReading)
	}
	return nil
}

func through[T any](r *readings, name string, read func() (T, error)) (T, error) {
	if err := r.read(name); err != nil {
		var none T
		return none, err
	}
	return read()
}

// readThrough lets the agents that start on the machine from now on read through r.
func (n *node) readThrough(r *readings) {
	n.hardware.readings = r
	n.hardware.wrap = func(d nvml.Device) nvml.Device { return readDevice{d, r} }
	n.pci = readKernel{n.hardware.kernel, r}
	n.fsys = readDisk{n.disk, r}
	tools := sharing.NewSimulated(n.hardware.machine)
	n.tools = sharing.Tools{TimeSlicer: tools.TimeSlicer, Daemons: readDaemons{tools.Daemons, r}, Processes: readProcesses{tools.Processes, r}, Persistenced: readPersistenced{tools.Persistenced, r}}
}

type readDevice struct {
	nvml.Device
	r *readings
}

func (d readDevice) UUID() (string, error) { return through(d.r, "UUID", d.Device.UUID) }

func (d readDevice) MIGMode() (nvml.MIGMode, error) {
	return through(d.r, "MIG mode", d.Device.MIGMode)
}

func (d readDevice) GPUInstances() ([]nvml.GPUInstance, error) {
	return through(d.r, "instances", d.Device.GPUInstances)
}

func (d readDevice) Processes() ([]nvml.Process, error) {
	return through(d.r, "processes", d.Device.Processes)
}

func (d readDevice) Readings() (nvml.Readings, error) {
	return through(d.r, "condition", d.Device.Readings)
}

func (d readDevice) MemoryUsedBytes() (uint64, error) {
	return through(d.r, "memory", d.Device.MemoryUsedBytes)
}

func (d readDevice) ComputeMode() (nvml.ComputeMode, error) {
	return through(d.r, "compute mode", d.Device.ComputeMode)
}

func (d readDevice) Persistence() (bool, error) {
	return through(d.r, "persistence", d.Device.Persistence)
}

type readPersistenced struct {
	sharing.PersistenceDaemon
	r *readings
}

func (p readPersistenced) Keeps(ctx context.Context, address string) (keeps bool, pid uint32, err error) {
	keeps, err = through(p.r, "persistenced", func() (bool, error) {
		keeps, of, err := p.PersistenceDaemon.Keeps(ctx, address)
		pid = of
		return keeps, err
	})
	return keeps, pid, err
}

// readKernel lets links fail, of which one is read wherever a function of the bus is.
type readKernel struct {
	vfio.Sysfs
	r *readings
}

func (k readKernel) ReadLink(name string) (string, error) {
	return through(k.r, "kernel "+name, func() (string, error) { return k.Sysfs.ReadLink(name) })
}

// readDisk lets the folders of what is remembered fail: records, and what is owed. A file that cannot be read has another copy.
type readDisk struct {
	durable.FS
	r *readings
}

func remembered(path string) bool {
	return slices.ContainsFunc([]string{"claims", "quarantine"}, func(dir string) bool { return strings.Contains(path, "/state/"+dir) })
}

func (d readDisk) ReadDir(path string) ([]fs.DirEntry, error) {
	if !remembered(path) {
		return d.FS.ReadDir(path)
	}
	return through(d.r, "folder "+filepath.Base(path), func() ([]fs.DirEntry, error) { return d.FS.ReadDir(path) })
}

type readUsers struct {
	vfio.Users
	r *readings
}

func (u readUsers) Of(ctx context.Context, nodes ...string) ([]uint32, error) {
	return through(u.r, "users", func() ([]uint32, error) { return u.Users.Of(ctx, nodes...) })
}

type readDaemons struct {
	sharing.Daemons
	r *readings
}

func (d readDaemons) Check(ctx context.Context, daemon sharing.Daemon) error {
	if err := d.r.read("whether daemons can be"); err != nil {
		return err
	}
	return d.Daemons.Check(ctx, daemon)
}

func (d readDaemons) Running(ctx context.Context, name string) (bool, error) {
	return through(d.r, "whether the daemon runs", func() (bool, error) { return d.Daemons.Running(ctx, name) })
}

func (d readDaemons) Ready(ctx context.Context, daemon sharing.Daemon) (bool, error) {
	return through(d.r, "whether the daemon is ready", func() (bool, error) { return d.Daemons.Ready(ctx, daemon) })
}

func (d readDaemons) List() ([]string, error) { return through(d.r, "daemons", d.Daemons.List) }

type readProcesses struct {
	sharing.Processes
	r *readings
}

func (p readProcesses) PodOf(pid uint32) (types.UID, error) {
	return through(p.r, "the process's pod", func() (types.UID, error) { return p.Processes.PodOf(pid) })
}

func (p readProcesses) DaemonOf(pid uint32) (string, error) {
	return through(p.r, "the process's daemon", func() (string, error) { return p.Processes.DaemonOf(pid) })
}

// lookedAtAgain tells of what need not be told: NVML is waited for, without the boot's ID what sharers of a GPU have is left, and a claim's record is
// looked for first without a lock.
func lookedAtAgain(op operation, at int, reading string) bool {
	switch reading {
	case "UUID", "boot ID":
		return op == unpreparing || op == "release"
	case "folder claims":
		return at == 0 && strings.HasPrefix(string(op), "prepare")
	}
	return false
}

// readingOperations are what an agent does that reads.
var readingOperations = map[operation]struct {
	from operation // what is begun at
	run  func(s *scenario, n *node) error
}{
	preparing:       {preparing, func(s *scenario, n *node) error { return s.run(n, preparing) }},
	unpreparing:     {unpreparing, func(s *scenario, n *node) error { return s.run(n, unpreparing) }},
	"prepare again": {unpreparing, func(s *scenario, n *node) error { return s.run(n, preparing) }},
	"prepare after a reboot": {unpreparing, func(s *scenario, n *node) error {
		return s.run(n, preparing)
	}},
	"release": {unpreparing, func(s *scenario, n *node) error {
		_, err := n.manager().Release(n.ctx, s.claim().UID, false, func(context.Context) string { return "" })
		return err
	}},
	"recover": {unpreparing, func(_ *scenario, n *node) error { _, err := n.manager().Recover(n.ctx); return err }},
}

// TestAReadingThatFailsIsNoSuccess: what an agent could not find out is told to the kubelet or, if a claim must go all the same, with its
// GPU's quarantine. It is not taken for nothing. Once it can be read everything is as after an undisturbed run.
func TestAReadingThatFailsIsNoSuccess(t *testing.T) {
	t.Parallel()
	for name, s := range scenarios {
		for label, op := range readingOperations {
			if label == "prepare after a reboot" && s.beside != nil {
				continue // the other one's record is of an earlier boot, whose ID is another one each time
			}
			t.Run(name+"/"+string(label), func(t *testing.T) {
				t.Parallel()
				run := func(r *readings) (*node, error) {
					n := newNodeOf(t, s.machine())
					s.start(t, n, op.from)
					if label == "prepare after a reboot" {
						n.do(&nvmlsim.Reboot{})
						n.do(s.before...)
						n.hardware.discover(t, n.hardware.policy)
					}
					if label == unpreparing || label == "release" { // somebody else's, where there may be one
						_, _ = n.hardware.machine.Do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 4711, Kind: nvmlsim.ProcessCompute, Pod: "somebody"}})
					}
					n.readThrough(r)
					return n, op.run(&s, n)
				}
				all := &readings{}
				undisturbed, err := run(all)
				if err != nil {
					t.Fatal(err)
				}
				want := undisturbed.state()
				for at, reading := range all.names {
					if raceDetector && (at+len(all.names))%3 != 0 { // make test-long tries all
						continue
					}
					n, err := run(&readings{fails: at + 1})
					n.restart()
					told := errors.Is(err, errReading)
					list, listErr := n.manager().Quarantined()
					if listErr != nil {
						t.Fatal(listErr)
					}
					quarantined := slices.ContainsFunc(list, func(q prepare.Quarantine) bool { return strings.Contains(q.Reason, errReading.Error()) })
					if !told && !quarantined && !lookedAtAgain(label, at, reading) {
						t.Errorf("%02d %s could not be read: error %v, in quarantine %+v", at+1, reading, err, list)
					}
					if s.profile == withSound && (label == unpreparing || label == "release") {
						n.hardware.discover(t, n.hardware.policy) // it must see GPUs that come back
					}
					m := n.manager()
					if recovery, err := m.Recover(n.ctx); err != nil || recovery.Quarantined > 0 {
						t.Errorf("%02d %s can be read again: %+v, %v", at+1, reading, recovery, err)
					}
					if label != "recover" {
						if err := op.run(&s, n); err != nil && !errors.Is(err, prepare.ErrNoClaim) {
							t.Errorf("%02d %s can be read again: %v", at+1, reading, err)
						}
					}
					if diff := want.diff(n.state()); diff != "" {
						t.Errorf("%02d %s can be read again (-undisturbed +now):\n%s", at+1, reading, diff)
					}
				}
			})
		}
	}
}
