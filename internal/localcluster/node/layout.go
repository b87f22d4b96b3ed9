// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"os"
	"path/filepath"

	"stowage.dev/stowage/internal/localcluster/node/enclosure"
)

// Paths as kubelet, containerd, their clients and the agent see them inside the enclosure. They are fixed in the one or the other
// of these programs, and short: the path of a socket has at most 107 bytes.
const (
	kubeletRoot      = "/var/lib/kubelet"
	cniState         = "/var/lib/cni"
	containerdState  = "/run/containerd"
	containerdSocket = containerdState + "/containerd.sock"
	cdiRoot          = "/var/run/cdi"
	containerLogs    = "/var/log/containers"
)

// layout is the node's folder.
type layout struct{ dir string }

func (l layout) path(elem ...string) string {
	return filepath.Join(append([]string{l.dir}, elem...)...)
}

func (l layout) kubelet() string        { return l.path("kubelet") }
func (l layout) kubeletConfig() string  { return l.path("kubelet.yaml") }
func (l layout) containerdRoot() string { return l.path("containerd") }
func (l layout) containerdToml() string { return l.path("containerd.toml") }
func (l layout) cniConfig() string      { return l.path("cni", "net.d") }
func (l layout) podLogs() string        { return l.path("pod-logs") }
func (l layout) cdi() string            { return l.path("cdi") }
func (l layout) devices() string        { return l.path("dev") }
func (l layout) agentState() string     { return l.path("agent") }

// shared are the folders with a fixed path, and what stands there instead.
func (l layout) shared() []enclosure.Bind {
	return []enclosure.Bind{
		{Source: l.kubelet(), Target: kubeletRoot},
		{Source: l.path("cni", "state"), Target: cniState},
		{Source: l.path("run"), Target: containerdState},
		{Source: l.cdi(), Target: cdiRoot},
		{Source: l.path("container-logs"), Target: containerLogs},
	}
}

// make makes every folder, in an empty or a new folder of the node.
func (l layout) make() error {
	folders := []string{l.containerdRoot(), l.cniConfig(), l.podLogs(), l.devices(), l.agentState()}
	for _, bind := range l.shared() {
		folders = append(folders, bind.Source)
	}
	for _, folder := range folders {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return fmt.Errorf("making the node's folders: %w", err)
		}
	}
	return nil
}

// remove removes the folder with all in it, device nodes included.
func (l layout) remove() error {
	if err := os.RemoveAll(l.dir); err != nil {
		return fmt.Errorf("removing the node's folder: %w", err)
	}
	return nil
}
