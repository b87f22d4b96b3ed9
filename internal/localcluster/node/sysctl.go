// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"stowage.dev/stowage/internal/localcluster/node/enclosure"
)

// wantedSettings are the kernel settings that kubelet (container_manager_linux.go, setupKernelTunables) and the ptp plugin
// (EnableForward) set when they differ. A node of a test has no business changing how the machine reacts to a kernel oops.
var wantedSettings = map[string]string{
	"vm/overcommit_memory":     "1",
	"vm/panic_on_oom":          "0",
	"kernel/panic":             "10",
	"kernel/panic_on_oops":     "1",
	"kernel/keys/root_maxkeys": "1000000",
	// 25 bytes a key.
	"kernel/keys/root_maxbytes": "25000000",
	"net/ipv4/ip_forward":       "1",
}

// hideSettings lets the programs of the node see files with the wanted values where the kernel settings are. They then write nothing; and
// if they did, they would write to the files. A pod's own /proc is the kernel's.
func hideSettings(l layout) ([]enclosure.Bind, error) {
	folder := l.path("sysctl")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	var binds []enclosure.Bind
	for name, value := range wantedSettings {
		target := filepath.Join("/proc/sys", name)
		if _, err := os.Stat(target); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		source := filepath.Join(folder, strings.ReplaceAll(name, "/", "."))
		if err := os.WriteFile(source, []byte(value+"\n"), 0o644); err != nil {
			return nil, fmt.Errorf("writing a kernel setting for the node: %w", err)
		}
		binds = append(binds, enclosure.Bind{Source: source, Target: target})
	}
	return binds, nil
}
