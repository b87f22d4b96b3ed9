// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package build makes the programs of a Kubernetes cluster out of Go modules,
// once per user and version, and finds them again in a cache.
//
// Two module descriptions beside this file pin every version: kubernetes (etcd
// and the Kubernetes components) and containerd (containerd, runc and the CNI
// plugins, whose requirements differ). They are embedded into this package, so
// a test in any folder and an installed binary build the same programs. As Go
// does not embed files of another module, their files end in ".in"; to change
// one, edit it and run `go generate` here, which tidies it.
//
// The package downloads sources through the ordinary Go module proxy and
// verifies them with go.sum; it never downloads a binary.
package build

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
)

//go:generate go run ./tidy

// Set names programs that are needed together.
type Set int

const (
	// ControlPlane is etcd, kube-apiserver, kube-controller-manager and
	// kubectl, with the helper that ties children to their parent's life.
	ControlPlane Set = iota
	// StockScheduler is kube-scheduler.
	StockScheduler
	// Node is kubelet, containerd, its shim and ctr, runc and the CNI plugins.
	// Building runc needs a C compiler.
	Node
)

// String is the set's name in messages.
func (s Set) String() string {
	switch s {
	case ControlPlane:
		return "control plane"
	case StockScheduler:
		return "stock scheduler"
	case Node:
		return "node"
	}
	return fmt.Sprintf("Set(%d)", int(s))
}

// Binaries tells where the built programs are. Programs of a set that was not
// asked for have a path, but may not exist.
type Binaries struct {
	// KubernetesDir holds etcd, tether and the Kubernetes components.
	KubernetesDir string
	// NodeDir holds containerd, its shim, ctr and runc.
	NodeDir string
	// CNIDir holds the CNI plugins; it is NodeDir, as containerd's
	// cni.bin_dirs may share a folder with other programs.
	CNIDir string
	// KubernetesVersion is for example "v1.37.1".
	KubernetesVersion string
	// ContainerdVersion is for example "v2.4.2".
	ContainerdVersion string
}

// Etcd is the path of etcd.
func (b Binaries) Etcd() string { return filepath.Join(b.KubernetesDir, "etcd") }

// Tether is the path of the helper that makes a command die with its parent.
func (b Binaries) Tether() string { return filepath.Join(b.KubernetesDir, "tether") }

// KubeAPIServer is the path of kube-apiserver.
func (b Binaries) KubeAPIServer() string { return filepath.Join(b.KubernetesDir, "kube-apiserver") }

// KubeControllerManager is the path of kube-controller-manager.
func (b Binaries) KubeControllerManager() string {
	return filepath.Join(b.KubernetesDir, "kube-controller-manager")
}

// KubeScheduler is the path of the stock kube-scheduler.
func (b Binaries) KubeScheduler() string { return filepath.Join(b.KubernetesDir, "kube-scheduler") }

// Kubectl is the path of kubectl.
func (b Binaries) Kubectl() string { return filepath.Join(b.KubernetesDir, "kubectl") }

// Kubelet is the path of the kubelet.
func (b Binaries) Kubelet() string { return filepath.Join(b.KubernetesDir, "kubelet") }

// Containerd is the path of containerd. Its shim lies beside it and must be
// found through its PATH.
func (b Binaries) Containerd() string { return filepath.Join(b.NodeDir, "containerd") }

// Ctr is the path of containerd's debugging client.
func (b Binaries) Ctr() string { return filepath.Join(b.NodeDir, "ctr") }

// Runc is the path of runc.
func (b Binaries) Runc() string { return filepath.Join(b.NodeDir, "runc") }

// Ensure builds the programs of the sets that are not in the cache yet and
// returns where they are. It writes a line to progress when it begins and ends
// a program, and regularly between. Two processes may call it at once: one
// builds, the other waits. It needs the go command only when it builds.
//
// The cache is $STOWAGE_CACHE, or the folder stowage in the user's cache
// folder.
func Ensure(ctx context.Context, progress io.Writer, sets ...Set) (Binaries, error) {
	if progress == nil {
		progress = io.Discard
	}
	cache, err := CacheDir()
	if err != nil {
		return Binaries{}, err
	}
	return ensure(ctx, cache, progress, goBuild, sets)
}

func ensure(ctx context.Context, cache string, progress io.Writer, compile compiler, sets []Set) (Binaries, error) {
	k8s, err := newStore(cache, kubernetesModule)
	if err != nil {
		return Binaries{}, err
	}
	ctrd, err := newStore(cache, containerdModule)
	if err != nil {
		return Binaries{}, err
	}
	for _, s := range []*store{k8s, ctrd} {
		if err := s.ensure(ctx, progress, compile, s.module.programsOf(sets)); err != nil {
			return Binaries{}, err
		}
	}
	return Binaries{
		KubernetesDir:     k8s.binDir(),
		NodeDir:           ctrd.binDir(),
		CNIDir:            ctrd.binDir(),
		KubernetesVersion: kubernetesModule.mustVersion("k8s.io/kubernetes"),
		ContainerdVersion: containerdModule.mustVersion("github.com/containerd/containerd/v2"),
	}, nil
}
