// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"io/fs"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"
)

// TestOnlyTheDriversNodesAreMadeOnTheHost, of which it is known what they are.
func TestOnlyTheDriversNodesAreMadeOnTheHost(t *testing.T) {
	var made []string
	d := NewDriver(DriverOptions{ProcRoot: t.TempDir(), MakeNode: func(path string, _, _ uint32, _ fs.FileMode) error {
		made = append(made, path)
		return nil
	}})
	open := ptr.To[fs.FileMode](0o666)
	d.makeNodes(t.Context(), []*specs.DeviceNode{
		{Path: "/dev/dri/card1", Type: "c", Major: 226, Minor: 1, FileMode: open}, // the kernel's to make
		{Path: "/dev/nvidia0", FileMode: open},                                    // without numbers
		{Path: "/dev/nvidia1", Type: "c", Major: 195, Minor: 1},                   // without a mode
		{Path: "/dev/nvidia2", Type: "c", Major: 195, Minor: 2, FileMode: open},
	})
	if diff := cmp.Diff([]string{"/dev/nvidia2"}, made); diff != "" {
		t.Errorf("made (-want +got):\n%s", diff)
	}
}
