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

// What nvcdi has found of the driver's files counts for firstAge, if all of it is there still: the driver may be half installed. With each look
// that finds the same it counts twice as long, commonAge at most. What comes later, such as the socket of a daemon, is found after that.
const (
	firstAge  = 10 * time.Second
	commonAge = 5 * time.Minute
)

// common is what all claims of the node need of the driver, as nvcdi has found it last.
type common struct {
	mu   sync.Mutex
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
	c := &d.common
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.edits == nil || c.from != from || time.Since(c.at) >= c.age || !allThere(c.edits) {
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
		if c.from == from && reflect.DeepEqual(c.edits, edits.ContainerEdits) {
			age = min(2*c.age, commonAge)
		}
		c.from, c.at, c.age, c.edits = from, at, age, edits.ContainerEdits
	}
	text, err := json.Marshal(c.edits)
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
