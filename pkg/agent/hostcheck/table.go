// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hostcheck

import "context"

// Level says what follows if a prerequisite is not met.
type Level string

// The levels.
const (
	// Required: without it no claim is prepared.
	Required Level = "required"
	// Recommended: without it something does not work, or is not safe.
	Recommended Level = "recommended"
	// Beside: it need not be there, and it matters if it is.
	Beside Level = "if present"
)

// Prerequisite is one thing that the agent needs, or has to get along with.
type Prerequisite struct {
	Name  string
	Level Level
	// Needs says what has to be so, and Do what an administrator does if it is not.
	Needs, Do string

	// driver: it is about the real driver, and nothing to simulated GPUs.
	driver bool
	look   func(ctx context.Context, h *Host) (Status, string)
}

// Table has all prerequisites, in the order in which one would see to them.
func Table() []Prerequisite {
	return []Prerequisite{
		{
			Name: "driver-files", Level: Required, driver: true, look: driverFiles,
			Needs: "the files of the NVIDIA driver, `libnvidia-ml.so.1` among them: on the host, in the GPU operator's driver container " +
				"(`/run/nvidia/driver`), or as GKE installs them (`/home/kubernetes/bin/nvidia`)",
			Do: "Install the NVIDIA driver, or let the GPU operator do it. If it is elsewhere, say so with `--driver-root`. The agent waits, " +
				"and goes on by itself.",
		},
		{
			Name: "driver-module", Level: Required, driver: true, look: driverModule,
			Needs: "the kernel module `nvidia`, loaded, in the version of the driver's files",
			Do:    "Run `modprobe nvidia` (with Secure Boot the module has to be signed). After an upgrade, reload the module or reboot.",
		},
		{
			Name: "nvidia-uvm", Level: Required, driver: true, look: uvm,
			Needs: "the kernel module `nvidia-uvm`, or the host's `modprobe`, with which the agent loads it for the first claim",
			Do:    "Run `modprobe nvidia-uvm` on the host, and have it loaded at boot (`/etc/modules-load.d`).",
		},
		{
			Name: "cdi", Level: Required, look: cdiInRuntime,
			Needs: "a container runtime that reads CDI specifications from `--cdi-root`: containerd 2.0, containerd 1.7 with `enable_cdi = true`, " +
				"or CRI-O 1.23",
			Do: "With containerd 1.7, set `enable_cdi = true` and `cdi_spec_dirs` in `[plugins.\"io.containerd.grpc.v1.cri\"]` of its " +
				"configuration and restart it. The folder of `--cdi-root` has to be among `cdi_spec_dirs`.",
		},
		{
			Name: "cdi-hook", Level: Required, driver: true, look: cdiHook,
			Needs: "`nvidia-cdi-hook` of NVIDIA's container toolkit, 1.18 or later: the agent's image brings its own; with `--nvidia-cdi-hook` " +
				"the host's is used",
			Do: "Upgrade NVIDIA's container toolkit to 1.18 or later, or leave `--nvidia-cdi-hook` out, so that the agent brings its own.",
		},
		{
			Name: "toolkit", Level: Recommended, driver: true, look: toolkit,
			Needs: "if NVIDIA's container runtime is installed: `accept-nvidia-visible-devices-envvar-when-unprivileged = false`, so that pods " +
				"get no GPU past their claims",
			Do: "Run `nvidia-ctk config --in-place --set accept-nvidia-visible-devices-envvar-when-unprivileged=false`.",
		},
		{
			Name: "cgroups", Level: Recommended, look: cgroups,
			Needs: "cgroup v2: kubelets of 1.35 and later do not start with v1 unless told so (`failCgroupV1: false`)",
			Do:    "Boot with `systemd.unified_cgroup_hierarchy=1`, or with an operating system that has cgroup v2.",
		},
		{
			Name: "mps", Level: Recommended, driver: true, look: mps,
			Needs: "for MPS alone, systemd, of which its daemons are units; or, without it (Talos), `hostPID`, Linux 5.12 and cgroups that the " +
				"agent may write, with the controllers memory and pids, of v1 also devices",
			Do: "Until it is so, claims that ask for MPS are refused on this node, and its devices do not have MPS in the attribute " +
				"`sharingStrategies`.",
		},
		{
			Name: "device-plugin", Level: Beside, driver: true, look: devicePlugin,
			Needs: "no other device plugin that offers GPUs: those that it offers are given to no claim",
			Do: "Switch it off on this node (GPU operator: `devicePlugin.enabled=false`, or the label " +
				"`nvidia.com/gpu.deploy.device-plugin=false`). To offer GPUs as `nvidia.com/gpu` use `--advertise`.",
		},
		{
			Name: "mig-manager", Level: Beside, driver: true, look: migManager,
			Needs: "no MIG manager with `--partitions=dynamic`: two would make and remove partitions",
			Do: "Switch it off on this node (GPU operator: `migManager.enabled=false`, or the label " +
				"`nvidia.com/gpu.deploy.mig-manager=false`), or run the agent with `--partitions=static`.",
		},
		{
			Name: "dcgm", Level: Beside, driver: true, look: dcgm,
			Needs: "with `--partitions=dynamic` or `--passthrough`, no DCGM that watches the GPUs: it holds partitions and GPUs, and they are in " +
				"use for the driver",
			Do: "Stop DCGM (`nv-hostengine`, `dcgm-exporter`) on this node, or run the agent with `--partitions=static` and without " +
				"`--passthrough`. `/metrics/gpus` of the agent has the GPUs' metrics.",
		},
		{
			Name: "persistenced", Level: Beside, driver: true, look: persistenced,
			Needs: "`nvidia-persistenced` keeps a driver loaded between containers; through its socket it is told to let go of GPUs that " +
				"`--passthrough` takes from the driver",
			Do: "With `--passthrough`, let its socket be `/run/nvidia-persistenced/socket` on the host or below the driver's root, or run it " +
				"without persistence mode (`--no-persistence-mode`).",
		},
	}
}
