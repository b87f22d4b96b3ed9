// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"
)

// What nvcdi has found of the driver's files counts for firstAge, if all of it is there still: the driver may be half
// installed. With each look that finds the same it counts twice as long, commonAge at most. What comes later, such as the
// socket of a daemon, is found after that.
const (
	firstAge  = 10 * time.Second
	commonAge = 5 * time.Minute
)

// common is what all claims of the node need of the driver, as nvcdi has found it last.
type common struct {
	mu   sync.Mutex // never held while files are looked at or NVML is asked, which may hang
	last found
}

type found struct {
	from commonSource
	at   time.Time
	age  time.Duration
	// edits are nil before they are found.
	edits *specs.ContainerEdits
}

// commonSource is where it was looked for. A driver that was loaded anew has another library: the agent is a new process then.
type commonSource struct {
	library       nvml.Interface
	hook, devRoot string
}

// findCommon returns a copy of what all claims need. It is looked for if that was too long ago, or elsewhere, or if something of
// it is gone.
func (d *Driver) findCommon(ctx context.Context) (*specs.ContainerEdits, error) {
	hook, err := d.hook(ctx)
	if err != nil {
		return nil, err
	}
	from := commonSource{library: d.library(GPU{}), hook: hook, devRoot: d.devRoot()}
	d.common.mu.Lock()
	last := d.common.last
	d.common.mu.Unlock()
	if last.edits == nil || last.from != from || time.Since(last.at) >= last.age || !allThere(last.edits) {
		lib, err := d.nvcdi(ctx, newNvcdiLogger(ctx), GPU{})
		if err != nil {
			return nil, err
		}
		at := time.Now()
		edits, err := lib.GetCommonEdits()
		if err != nil {
			return nil, fmt.Errorf("look for the driver's files below %s: %w", d.opts.DriverRoot, err)
		}
		age := firstAge
		if last.from == from && reflect.DeepEqual(last.edits, edits.ContainerEdits) {
			age = min(2*last.age, commonAge)
		}
		last = found{from: from, at: at, age: age, edits: edits.ContainerEdits}
		d.common.mu.Lock()
		d.common.last = last
		d.common.mu.Unlock()
	}
	text, err := json.Marshal(last.edits)
	if err != nil {
		return nil, fmt.Errorf("copy the driver's files: %w", err)
	}
	edits := &specs.ContainerEdits{}
	if err := json.Unmarshal(text, edits); err != nil {
		return nil, fmt.Errorf("copy the driver's files: %w", err)
	}
	return edits, nil
}

// allThere tells whether all files are there, and device nodes have the numbers that they had.
func allThere(edits *specs.ContainerEdits) bool {
	for _, mount := range edits.Mounts {
		if _, err := os.Stat(mount.HostPath); err != nil {
			return false
		}
	}
	for _, node := range edits.DeviceNodes {
		var stat unix.Stat_t
		if err := unix.Stat(cmp.Or(node.HostPath, node.Path), &stat); err != nil {
			return false
		}
		if node.Major != 0 && (int64(unix.Major(stat.Rdev)) != node.Major || int64(unix.Minor(stat.Rdev)) != node.Minor) {
			return false
		}
	}
	return true
}
