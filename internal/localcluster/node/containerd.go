// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"text/template"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/internal/localcluster/image"
)

const runcPackage = "stowage.dev/stowage/internal/localcluster/node/runc"

// containerdConfig leaves to containerd's defaults whatever works with them.
var containerdConfig = template.Must(template.New("containerd.toml").Parse(`version = 3
imports = []
root = {{printf "%q" .Root}}
state = {{printf "%q" .State}}
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]

[grpc]
  address = {{printf "%q" .Socket}}

[plugins."io.containerd.internal.v1.opt"]
  path = {{printf "%q" .Opt}}

[plugins."io.containerd.cri.v1.images"]
  snapshotter = {{printf "%q" .Snapshotter}}
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = {{printf "%q" .Sandbox}}

[plugins."io.containerd.cri.v1.runtime"]
  cdi_spec_dirs = [{{printf "%q" .CDI}}]
  # Without CAP_SYS_RESOURCE runc cannot lower a score, and says "can't get final child's PID from pipe".
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = [{{printf "%q" .CNIBin}}]
    conf_dir = {{printf "%q" .CNIConfig}}
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = {{printf "%q" .Runc}}
      SystemdCgroup = false

[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"

[plugins."io.containerd.transfer.v1.local"]
  [[plugins."io.containerd.transfer.v1.local".unpack_config]]
    platform = {{printf "%q" .Platform}}
    snapshotter = {{printf "%q" .Snapshotter}}
`))

// startContainerd starts containerd, waits until it answers, and imports the test images.
func (n *Node) startContainerd(ctx context.Context) error {
	runc := n.layout.path("bin", "runc-without-seccomp")
	if err := image.Compile(ctx, runcPackage, runc); err != nil {
		return err
	}
	var config bytes.Buffer
	err := containerdConfig.Execute(&config, map[string]string{
		"Root":        n.layout.containerdRoot(),
		"State":       containerdState,
		"Socket":      containerdSocket,
		"Opt":         n.layout.path("opt"),
		"Snapshotter": n.snapshotter(),
		"Sandbox":     image.Sandbox,
		"CDI":         cdiRoot,
		"CNIBin":      n.binaries.CNIDir,
		"CNIConfig":   n.layout.cniConfig(),
		"Runc":        runc,
		"Platform":    image.Platform,
	})
	if err != nil {
		return err
	}
	if err := os.WriteFile(n.layout.containerdToml(), config.Bytes(), 0o644); err != nil {
		return err
	}
	path, args := n.enclosure.Wrap(n.binaries.Containerd(), "--config", n.layout.containerdToml())
	n.containerd, err = localcluster.StartProcess(ctx, localcluster.Command{
		Name:    n.name + "-containerd",
		Path:    path,
		Args:    args,
		Env:     []string{"PATH=" + n.binaries.NodeDir + ":" + os.Getenv("PATH")},
		LogFile: n.LogFile("containerd"),
		Ready: func(ctx context.Context) error {
			_, err := n.ctr(ctx, "version")
			return err
		},
	})
	if err != nil {
		return err
	}
	if _, err := n.ctr(ctx, "images", "import", "--snapshotter", n.snapshotter(), n.archive); err != nil {
		return fmt.Errorf("importing the test images: %w", err)
	}
	return nil
}

// SignalContainerd sends containerd a signal, for instance SIGSTOP: then containers run on, and none is started or ended.
func (n *Node) SignalContainerd(signal syscall.Signal) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.containerd.Signal(signal)
}

// snapshotter is overlayfs, unless the node's folder lies on an overlay itself, as it does in most containers.
func (n *Node) snapshotter() string {
	if onOverlay(n.layout.dir) {
		return "native"
	}
	return "overlayfs"
}

// ctr runs containerd's own client in the kubelet's namespace of containerd, and returns its output.
func (n *Node) ctr(ctx context.Context, args ...string) (string, error) {
	path, args := n.enclosure.Wrap(n.binaries.Ctr(), append([]string{"--address", containerdSocket, "--namespace", "k8s.io"}, args...)...)
	out, err := exec.CommandContext(ctx, path, args...).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return "", fmt.Errorf("ctr %v: %w: %s", args, err, bytes.TrimSpace(exit.Stderr))
	}
	return string(out), err
}
