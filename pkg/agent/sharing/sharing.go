// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/config"
)

// Tools are all that is needed; none but Pods may be nil.
type Tools struct {
	TimeSlicer TimeSlicer
	Daemons    Daemons
	Processes  Processes
	// Persistenced is what keeps GPUs open that are to leave their driver.
	Persistenced PersistenceDaemon
	// Pods of which a process is there. It is nil where containers have no real GPUs.
	Pods func() (map[types.UID]bool, error)
}

// TimeSlicer sets how long a process keeps a GPU before the next one gets it.
type TimeSlicer interface {
	// SetTimeSlice of the GPU at that PCI address: one that is lost makes handles by UUID fail for all others.
	SetTimeSlice(ctx context.Context, gpu string, interval config.Interval) error
}

// Daemons of the Multi-Process Service. They outlive the agent, whose containers would lose their GPUs else.
type Daemons interface {
	// Check returns an error if no such daemon can be started here. It changes nothing.
	Check(ctx context.Context, daemon Daemon) error
	// Start returns when the daemon takes clients and its limits are set. One of that name that runs already
	// is kept, and gets its limits if it may not have them. After an error there may be one, to be stopped or started again.
	Start(ctx context.Context, daemon Daemon) error
	// Stop ends the daemon and removes what it had. That there is none is no error.
	Stop(ctx context.Context, name string) error
	// Running tells whether there is one.
	Running(ctx context.Context, name string) (bool, error)
	// Ready tells whether there is one that has its limits.
	Ready(ctx context.Context, daemon Daemon) (bool, error)
	// List names the daemons of which something is there, running or not.
	List() ([]string, error)
	// Edits are what its clients' containers need.
	Edits(name string) *specs.ContainerEdits
}

// Daemon is a control daemon with one server.
type Daemon struct {
	// Name is part of file names; it never comes from a claim's parameters.
	Name string
	// GPUs, or one MIG device, by UUID.
	GPUs []string
	// ActiveThreadPercentage of a client; 0 for no limit.
	ActiveThreadPercentage int
	// MemoryMiB of a client on each GPU; 0 for no limit.
	MemoryMiB []int64
	// MultiUser says whether clients of several users are served at once.
	MultiUser MultiUser
}

// MultiUser of a daemon: whether clients of several users are served at once. By itself a daemon serves one user at a time, and the others'
// clients hang in cuInit. Drivers can do this since some version after 525.
type MultiUser string

// All but MultiUserNo.
const (
	// MultiUserNo serves one user after the other.
	MultiUserNo MultiUser = ""
	// MultiUserIfPossible serves one user after the other if the driver can no better.
	MultiUserIfPossible MultiUser = "IfPossible"
	// MultiUserYes keeps the daemon from its start if the driver cannot.
	MultiUserYes MultiUser = "Yes"
)

// ErrNoProcess means that there is no process with that ID, or that it cannot be seen from here.
var ErrNoProcess = errors.New("no such process")

// Processes of the node.
type Processes interface {
	// PodOf returns the pod that the process belongs to, "" for none. The error wraps ErrNoProcess.
	PodOf(pid uint32) (types.UID, error)
	// NameOf returns the name of the process's command, of at most 15 bytes. The error wraps ErrNoProcess.
	NameOf(pid uint32) (string, error)
	// DaemonOf returns the name of the daemon of ours that the process is, or is a server of; "" for none. The error wraps ErrNoProcess.
	DaemonOf(pid uint32) (string, error)
	// End kills the process if it belongs to that pod still, and does not wait. That it is gone is no error.
	End(pid uint32, pod types.UID) error
}
