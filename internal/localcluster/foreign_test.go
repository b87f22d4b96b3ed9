// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestForeignKubelet(t *testing.T) {
	const cache = "/home/user/.cache/stowage"
	tests := map[string]struct {
		stat, cmdline, exe string
		socket             bool
		want               string // part of the error; empty for none
	}{
		"another program":          {stat: "7 (bash) S 1 7", cmdline: "bash\x00", exe: "/bin/bash"},
		"a kubelet of ours":        {stat: "7 (kubelet) S 1 7", exe: cache + "/kubernetes-v1/bin/kubelet"},
		"an ended kubelet":         {stat: "7 (kubelet) Z 1 7", exe: "/usr/bin/kubelet"},
		"a kubelet":                {stat: "7 (kubelet) S 1 7", exe: "/usr/bin/kubelet", want: "process 7 (/usr/bin/kubelet)"},
		"a kubelet of another uid": {stat: "7 (kubelet) S 1 7", want: "process 7 (unknown program)"},
		"a kubelet in a folder that only begins like the cache": {
			stat: "7 (kubelet) S 1 7", exe: cache + "-other/kubelet", want: "process 7",
		},
		"a renamed thread":     {stat: "7 (main) ) S 1 7", cmdline: "/opt/bin/kubelet\x00--v=2\x00", exe: "/opt/bin/kubelet", want: "process 7"},
		"hyperkube":            {stat: "7 (hyperkube) S 1 7", cmdline: "/hyperkube\x00kubelet\x00", exe: "/hyperkube", want: "process 7"},
		"only a socket":        {stat: "7 (bash) S 1 7", exe: "/bin/bash", socket: true, want: "kubelet.sock exists"},
		"an unreadable status": {stat: "?", exe: "/bin/bash"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			dir := filepath.Join(root, "proc", "7")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			socket := filepath.Join(root, "kubelet.sock")
			files := map[string]string{filepath.Join(dir, "stat"): test.stat, filepath.Join(dir, "cmdline"): test.cmdline}
			if test.socket {
				files[socket] = ""
			}
			for path, data := range files {
				if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if test.exe != "" {
				if err := os.Symlink(test.exe, filepath.Join(dir, "exe")); err != nil {
					t.Fatal(err)
				}
			}
			err := foreignKubelet(filepath.Join(root, "proc"), socket, cache)
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
		})
	}
}
