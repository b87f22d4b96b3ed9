// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/exporter"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// hookOptions say where nvidia-cdi-hook is: on the host, or beside the agent, which brings it there.
type hookOptions struct {
	path, from string
}

// options are the flags' values.
type options struct {
	nodeName       string
	nvml           string
	driverRoot     string
	hostDriverRoot string
	simulation

	kubeconfig  string
	podUID      string
	kubeletRoot string
	cdiRoot     string
	stateDir    string
	devRoot     string
	hook        hookOptions

	serveOptions
	exporterOptions

	partitions  string
	passthrough bool
	shareOptions
	pluginOptions

	leftovers string
	// hostProcesses is a policy.
	hostProcesses string
	lockTimeout   time.Duration
	mpsRoot       string
	// mpsShmSize is a quantity.
	mpsShmSize string
	mpsSandbox bool
	// healthRules is a health.Policy.
	healthRules string
	host        hostOptions
}

// simulation says how GPUs are simulated.
type simulation struct {
	simDir, simLibrary string
	simMPSFolders      bool
}

// shareOptions say how a GPU is shared.
type shareOptions struct {
	shareGPUs string
	// shareMemoryStep is a quantity, shareComputeStep percent.
	shareMemoryStep  string
	shareComputeStep int
	// shareReplicas is for the device plugin API; 0 for none.
	shareReplicas int
	// allowSharing is a list of strategies, shareStrategy one of them.
	allowSharing          string
	shareStrategy         string
	shareAcrossNamespaces bool
}

// pluginOptions say what is offered by the device plugin API, and how.
type pluginOptions struct {
	advertise          string
	deviceListStrategy string
	migStrategy        string
}

// serveOptions say where and for whom health and metrics are served.
type serveOptions struct {
	healthAddress string
	certFile      string
	keyFile       string
	clientCAFile  string
}

// defaultOptions takes what a DaemonSet passes through the downward API from the environment.
func defaultOptions(env func(string) (string, bool), hostname func() (string, error)) *options {
	opts := &options{
		nvml:        nvml.SpecAuto,
		driverRoot:  nvml.SpecAuto,
		kubeletRoot: "/var/lib/kubelet",
		cdiRoot:     "/var/run/cdi",
		stateDir:    "/var/lib/stowage",
		devRoot:     "/run/stowage/dev",
		partitions:  partitionsStatic,

		serveOptions:    serveOptions{healthAddress: "127.0.0.1:0"},
		exporterOptions: exporterOptions{interval: exporter.DefaultInterval},

		shareOptions: shareOptions{
			shareGPUs:        "none",
			shareMemoryStep:  "1Gi",
			shareComputeStep: 5,
			allowSharing:     "time-slicing,mps",
			shareStrategy:    "time-slicing",
		},
		pluginOptions: pluginOptions{
			advertise: string(advertise.DRA), deviceListStrategy: string(deviceplugin.CDIByCRI),
			migStrategy: string(pluginpath.MIGNone),
		},

		leftovers:   string(prepare.EndLeftovers),
		lockTimeout: prepare.DefaultLockTimeout,

		hostProcesses: string(driver.WarnOfHostProcesses),

		mpsRoot:    "/run/stowage/mps",
		mpsShmSize: "64Mi",
		mpsSandbox: true,

		host: defaultHostOptions(),
	}
	opts.podUID, _ = env("POD_UID")
	name, ok := env("NODE_NAME")
	if !ok {
		// Like the kubelet, which takes the host's name for the node's.
		name, _ = hostname()
		name = strings.ToLower(name)
	}
	opts.nodeName = name
	return opts
}

// addHardwareFlags adds what every subcommand needs to find GPUs.
func (o *options) addHardwareFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.nodeName, "node-name", o.nodeName,
		"name of this machine's Node object; NODE_NAME in the environment, or the host's name, if not given")
	flags.StringVar(&o.nvml, "nvml", o.nvml,
		"NVML library: auto (the driver's, which may be installed later), the path of a library, or sim:<profile> for simulated GPUs")
	flags.StringVar(&o.driverRoot, "driver-root", o.driverRoot,
		"folder below which this program sees the files of the NVIDIA driver; auto looks below the host's "+nvml.DriverRoots())
	flags.StringVar(&o.simDir, "sim-dir", o.simDir,
		"folder that keeps the state and the control socket of simulated GPUs; to serve a kubelet, sim in --state-dir if not given")
	flags.StringVar(&o.simLibrary, "sim-library", o.simLibrary,
		"a simulated libnvidia-ml.so.1 (make nvml-library) through which simulated GPUs are asked, loaded as a driver's is; "+
			"without it they are simulated within this process")
	flags.StringVar(&o.partitions, "partitions", o.partitions,
		"static offers the MIG devices that an administrator has made, dynamic also those that can be made, which come and go with their claims")
	flags.StringVar(&o.shareGPUs, "share-gpus", o.shareGPUs,
		"GPUs that several claims can have at once, each with a share of the memory and the compute: none, all, or PCI addresses "+
			"(0000:1b:00.0), device names or indices with commas between; they are not partitioned")
	flags.StringVar(&o.shareMemoryStep, "share-memory-step", o.shareMemoryStep,
		"what shares of a GPU's memory are multiples of, and the least that one can be")
	flags.IntVar(&o.shareComputeStep, "share-compute-step", o.shareComputeStep,
		"what shares of a GPU's compute are multiples of, in percent; with 0 they are of memory alone")
	flags.StringVar(&o.allowSharing, "allow-sharing", o.allowSharing,
		"how the processes of a claim may share its GPU, if the claim asks for it: time-slicing, mps, both with a comma between, or none; "+
			"published as the attribute sharingStrategies of each device. Neither is a boundary between who does not trust each other")
	flags.StringVar(&o.shareStrategy, "share-strategy", o.shareStrategy,
		"how the GPUs of --share-gpus are shared by the claims that have them, which have no say in it: time-slicing or mps, and one of "+
			"--allow-sharing")
	flags.BoolVar(&o.passthrough, "passthrough", o.passthrough,
		"offer whole GPUs to virtual machines, too: as devices of type vfio, which leave the NVIDIA driver for as long as a claim has them")
	flags.StringVar(&o.hostDriverRoot, "host-driver-root", o.hostDriverRoot,
		"the same folder as the container runtime sees it; --driver-root if not given")
	flags.StringVar(&o.host.root, "host-root", o.host.root,
		"the host's root folder as this program sees it; what containers are given is looked up there, and daemons of the Multi-Process "+
			"Service are started there, by systemd or in cgroups of their own")
}

// keepSimulation gives simulated GPUs a place to outlive this process in.
func (o *options) keepSimulation() {
	if o.simDir == "" {
		o.simDir = filepath.Join(o.stateDir, "sim")
	}
}

// addRunFlags adds what serving a kubelet needs.
func (o *options) addRunFlags(flags *pflag.FlagSet) {
	o.addUseFlags(flags)
	flags.StringVar(&o.kubeconfig, "kubeconfig", o.kubeconfig, "kubeconfig file; the pod's ServiceAccount if not given")
	flags.StringVar(&o.podUID, "pod-uid", o.podUID,
		"UID of the agent's pod, so that its successor can start while it still serves; POD_UID in the environment if not given")
	flags.StringVar(&o.kubeletRoot, "kubelet-root-dir", o.kubeletRoot,
		"the kubelet's --root-dir; sockets are made in its folders plugins and plugins_registry")
	flags.StringVar(&o.cdiRoot, "cdi-root", o.cdiRoot, "folder from which the container runtime reads CDI specifications")
	flags.StringVar(&o.stateDir, "state-dir", o.stateDir, "folder for the ledger of prepared claims, which must outlive restarts and reboots")
	flags.StringVar(&o.devRoot, "dev-root", o.devRoot, "folder for the device nodes of simulated GPUs")
	flags.StringVar(&o.hook.path, "nvidia-cdi-hook", o.hook.path,
		"path of the nvidia-cdi-hook program on the host; nvcdi's default, /usr/bin/nvidia-cdi-hook, if not given")
	flags.StringVar(&o.hook.from, "nvidia-cdi-hook-from", o.hook.from,
		"an nvidia-cdi-hook program beside the agent, which it puts into the folder bin of --state-dir for the container runtime, or into its "+
			"plugin's folder below --kubelet-root-dir where no program runs (noexec); not used where --nvidia-cdi-hook is given")
	o.host.addFlags(flags)
	flags.StringVar(&o.healthAddress, "health-address", o.healthAddress,
		"address for /healthz, /readyz, /metrics and /metrics/gpus, over TLS; port 0 takes a free one, an empty value serves none")
	flags.StringVar(&o.certFile, "tls-cert-file", o.certFile,
		"certificate to serve --health-address with, read anew when it changes; one signed by itself if not given")
	flags.StringVar(&o.keyFile, "tls-private-key-file", o.keyFile, "private key of --tls-cert-file")
	flags.StringVar(&o.clientCAFile, "client-ca-file", o.clientCAFile,
		"authority whose certificates name who reads /metrics and /metrics/gpus; without one only tokens do")
	o.exporterOptions.addFlags(flags)
}

// addUseFlags adds how GPUs are shared and taken back.
func (o *options) addUseFlags(flags *pflag.FlagSet) {
	flags.BoolVar(&o.shareAcrossNamespaces, "share-across-namespaces", o.shareAcrossNamespaces,
		"give shares of one GPU to claims of several namespaces; without it, a claim waits for a GPU of which another namespace has shares")
	flags.IntVar(&o.shareReplicas, "share-replicas", o.shareReplicas,
		fmt.Sprintf("as how many devices each GPU of --share-gpus is offered that is on the path %s of --advertise: as %s, each with an equal "+
			"share of the memory and the compute, to pods of any namespace (%s); 0 offers none of them there", advertise.DevicePlugin,
			pluginpath.SharedResource, config.AcrossNamespacesFlag))
	flags.StringVar(&o.leftovers, "leftover-processes", o.leftovers,
		"what is done about processes of a pod that are still on its GPU when its claim is unprepared: end kills them, quarantine gives the "+
			"GPU to nobody until they are gone")
	flags.StringVar(&o.hostProcesses, "host-processes", o.hostProcesses,
		"what is done about processes of the host, other than NVIDIA's daemons, on a GPU that no claim has: warn tells of them on the Node and "+
			"by a metric, taint also gives the GPU to no claim until they are gone")
	flags.StringVar(&o.advertise, "advertise", o.advertise,
		"how GPUs are offered: dra (by claims), device-plugin (as nvidia.com/gpu by the kubelet's device plugin API) or none; for single GPUs "+
			"NAME=PATH, by UUID, PCI address or device name, with commas between: dra,0000:1b:00.0=device-plugin. A GPU that a pod has by one path "+
			"is offered by another one when that pod has ended")
	flags.StringVar(&o.deviceListStrategy, "device-list-strategy", o.deviceListStrategy,
		"how the container runtime is told which GPUs a container gets by the device plugin API: cdi-cri, cdi-annotations, envvar "+
			"(NVIDIA_VISIBLE_DEVICES), or several with commas between")
	flags.StringVar(&o.migStrategy, "mig-strategy", o.migStrategy,
		"how MIG devices that an administrator has made are offered by the device plugin API: none, single (as nvidia.com/gpu, if all GPUs of "+
			"that path are partitioned and all MIG devices have one profile) or mixed (nvidia.com/mig-<profile>)")
	flags.DurationVar(&o.lockTimeout, "lock-timeout", o.lockTimeout,
		fmt.Sprintf("how long a call of the kubelet waits for GPUs that other calls or another agent work on; less than the %s after which the "+
			"kubelet gives up, so that there is time for the work itself; a call that takes GPUs back waits for no more than %s of it, because "+
			"what it undoes may take %s", prepare.KubeletPatience, prepare.DefaultLockTimeout, prepare.DefaultUndoTimeout))
	flags.StringVar(&o.healthRules, "health-rules", o.healthRules,
		"which of the rules that judge a GPU are softened, with commas between: off, notice (told, and nothing else) or avoid (no new claim "+
			"gets the GPU, and no pod is moved), such as pcie-width=off,xid/74=notice,gpu-lost=avoid, or made harder (memory-left=avoid), each "+
			"with PRODUCT: before it if it is for the GPUs of that product only; the rules are the names of the agent's taints")
	flags.StringVar(&o.mpsRoot, "mps-root", o.mpsRoot,
		"folder for the daemons of NVIDIA's Multi-Process Service, with the same path inside and outside of a container")
	flags.StringVar(&o.mpsShmSize, "mps-shm-size", o.mpsShmSize,
		"how much memory the folder of one daemon of the Multi-Process Service may take, in which its clients have their shared "+
			"memory (/dev/shm)")
	flags.BoolVar(&o.mpsSandbox, "mps-sandbox", o.mpsSandbox,
		"take from daemons of the Multi-Process Service what root has and they do not need: capabilities, other devices, writing outside of "+
			"their folder; needs systemd 242 or, on a host without systemd, Linux 5.12. A daemon that runs keeps what it was started with")
	flags.BoolVar(&o.simMPSFolders, "sim-mps-folders", o.simMPSFolders,
		"give the simulated daemons of the Multi-Process Service the folder of a real one, in --mps-root, and it to their clients; needs the "+
			"right to mount")
}

const (
	partitionsStatic  = "static"
	partitionsDynamic = "dynamic"

	shareByMPS = "mps"
)

// validateUse names the flag that is wrong.
func (o *options) validateUse() error {
	if o.lockTimeout <= 0 || o.lockTimeout >= prepare.KubeletPatience {
		return fmt.Errorf("--lock-timeout %s: want more than 0 and less than %s, which is when the kubelet gives up",
			o.lockTimeout, prepare.KubeletPatience)
	}
	if p := driver.HostProcesses(o.hostProcesses); p != driver.WarnOfHostProcesses && p != driver.TaintForHostProcesses {
		return fmt.Errorf("--host-processes %q: want %s or %s", o.hostProcesses, driver.WarnOfHostProcesses, driver.TaintForHostProcesses)
	}
	if _, err := health.ParsePolicy(o.healthRules); err != nil {
		return fmt.Errorf("--health-rules %w", err)
	}
	if _, err := o.mpsShm(); err != nil {
		return err
	}
	if _, err := o.advertised(); err != nil {
		return err
	}
	switch prepare.Leftovers(o.leftovers) {
	case prepare.EndLeftovers, prepare.QuarantineLeftovers:
		return nil
	}
	return fmt.Errorf("--leftover-processes %q: want %s or %s", o.leftovers, prepare.EndLeftovers, prepare.QuarantineLeftovers)
}

// advertised names the flag that is wrong.
func (o *pluginOptions) advertised() (as pluginpath.Advertised, err error) {
	if as.Paths, err = advertise.Parse(o.advertise); err != nil {
		return as, fmt.Errorf("--advertise %s: %w", o.advertise, err)
	}
	if as.Strategies, err = deviceplugin.ParseStrategies(o.deviceListStrategy); err != nil {
		return as, fmt.Errorf("--device-list-strategy %s: %w", o.deviceListStrategy, err)
	}
	as.MIG = pluginpath.MIGStrategy(o.migStrategy)
	if as.MIG != pluginpath.MIGNone && as.MIG != pluginpath.MIGSingle && as.MIG != pluginpath.MIGMixed {
		return as, fmt.Errorf("--mig-strategy %q: want %s, %s or %s", o.migStrategy, pluginpath.MIGNone,
			pluginpath.MIGSingle, pluginpath.MIGMixed)
	}
	return as, nil
}

// validateReplicas refuses GPUs that are to be shared and to be offered by the device plugin API, if it is not said how. That two names are
// one GPU's is known only when it is found.
func (o *options) validateReplicas(shares *discovery.Shares) error {
	as, err := o.advertised()
	if err != nil {
		return err
	}
	if n := shares.Replicas; n != 0 {
		switch {
		case n < discovery.MinReplicas || n > discovery.MaxReplicas:
			return fmt.Errorf("--share-replicas=%d: want %d to %d, or 0 to offer no replicas", n, discovery.MinReplicas, discovery.MaxReplicas)
		case !shares.All && len(shares.GPUs) == 0:
			return fmt.Errorf("--share-replicas=%d --share-gpus=%s: want the GPUs that are shared", n, o.shareGPUs)
		case !o.shareAcrossNamespaces:
			return fmt.Errorf("--share-replicas=%d: want %s with it: the kubelet gives replicas of one GPU to pods of any namespace", n,
				config.AcrossNamespacesFlag)
		case o.shareStrategy == shareByMPS && !slices.Contains(as.Strategies, deviceplugin.CDIByCRI) &&
			!slices.Contains(as.Strategies, deviceplugin.CDIByAnnotation):
			return fmt.Errorf("--share-replicas=%d %s=%s --device-list-strategy=%s: want %s or %s in it: without CDI a container gets nothing of "+
				"the MPS daemon",
				n, config.SharesFlag, o.shareStrategy, o.deviceListStrategy, deviceplugin.CDIByCRI, deviceplugin.CDIByAnnotation)
		}
		return nil
	}
	names := shares.GPUs
	if shares.All {
		names = []string{""}
	}
	for _, name := range names {
		if as.Paths.Named(name) == advertise.DevicePlugin {
			return fmt.Errorf("--share-gpus=%s --advertise=%s: %s cannot be both shared and on the path %s without --share-replicas, which says "+
				"as how many devices a GPU is offered there",
				o.shareGPUs, o.advertise, cmp.Or(name, "all GPUs"), advertise.DevicePlugin)
		}
	}
	return nil
}

// mpsShm is in bytes.
func (o *options) mpsShm() (int64, error) {
	size, err := resource.ParseQuantity(o.mpsShmSize)
	if err != nil {
		return 0, fmt.Errorf("--mps-shm-size %q: %w", o.mpsShmSize, err)
	}
	if size.Cmp(leastShm) < 0 || size.Cmp(mostShm) > 0 {
		return 0, fmt.Errorf("--mps-shm-size %q: want %s to %s", o.mpsShmSize, leastShm.String(), mostShm.String())
	}
	return size.Value(), nil
}

var leastShm, mostShm = resource.MustParse("1Mi"), resource.MustParse("1Ti")

// validateHardware names the flag that is wrong, and finds what is to be found by itself.
func (o *options) validateHardware() error {
	if reasons := validation.IsDNS1123Subdomain(o.nodeName); len(reasons) > 0 {
		return fmt.Errorf("--node-name %q: %s", o.nodeName, strings.Join(reasons, "; "))
	}
	for flag, path := range map[string]string{"driver-root": o.driverRoot, "host-root": o.host.root} {
		if !filepath.IsAbs(path) && (flag != "driver-root" || path != nvml.SpecAuto) {
			return fmt.Errorf("--%s %q: an absolute path is needed", flag, path)
		}
	}
	o.settleDriverRoot()
	if o.partitions != partitionsStatic && o.partitions != partitionsDynamic {
		return fmt.Errorf("--partitions %q: want %s or %s", o.partitions, partitionsStatic, partitionsDynamic)
	}
	if shares, err := o.shares(); err != nil {
		return err
	} else if err := o.validateReplicas(&shares); err != nil {
		return err
	}
	if _, err := o.sharing(); err != nil {
		return err
	}
	if o.simLibrary != "" && !strings.HasPrefix(o.nvml, "sim:") {
		return fmt.Errorf("--sim-library %s: want --nvml=sim:<profile> with it, not %s", o.simLibrary, o.nvml)
	}
	if !strings.HasPrefix(o.nvml, "sim:") && strings.Contains(o.nvml, "/") {
		if _, err := os.Stat(o.nvml); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("--nvml %s: there is no such library; give another path, or auto to wait for the driver to be installed", o.nvml)
		} else if err != nil {
			return fmt.Errorf("--nvml %s: %w", o.nvml, err)
		}
	}
	return nil
}

// shares says which GPUs are shared, and how.
func (o *options) shares() (discovery.Shares, error) {
	shares, err := discovery.ParseShares(o.shareGPUs, o.shareMemoryStep, o.shareComputeStep)
	if err != nil {
		return shares, fmt.Errorf("--share-gpus=%s --share-memory-step=%s --share-compute-step=%d: %w", o.shareGPUs,
			o.shareMemoryStep, o.shareComputeStep, err)
	}
	shares.Replicas = o.shareReplicas
	return shares, nil
}

// sharing is what claims may ask for.
func (o *options) sharing() (config.Rules, error) {
	rules, err := config.ParseRules(o.nodeName, o.allowSharing, o.shareStrategy)
	if err != nil {
		return rules, err
	}
	if o.shareGPUs != "none" && !slices.Contains(rules.Allowed, rules.Shares) {
		return rules, fmt.Errorf("%s=%s --share-gpus=%s: %s=%s does not allow it", config.SharesFlag, o.shareStrategy, o.shareGPUs,
			config.AllowFlag, o.allowSharing)
	}
	rules.AcrossNamespaces = o.shareAcrossNamespaces
	return rules, nil
}

// onHost are the rules on this host, which may be one that does no MPS with a real driver. That is told once, not for each claim.
func (o *options) onHost(ctx context.Context, rules config.Rules, simulated bool) config.Rules {
	if simulated {
		return rules
	}
	daemons, err := o.daemons()
	var how string
	if err == nil {
		how, err = sharing.CheckHost(daemons)
	}
	if err != nil {
		klog.FromContext(ctx).Info("Claims get no MPS on this node", "reason", err.Error())
		rules.NoMPS = err.Error()
		return rules
	}
	klog.FromContext(ctx).Info("MPS daemons are started for claims that ask for MPS", "as", how)
	return rules
}

// validateRun checks the folders; all are part of what others on the node are told, so none may be relative.
func (o *options) validateRun() error {
	for flag, path := range map[string]string{
		"kubelet-root-dir": o.kubeletRoot,
		"cdi-root":         o.cdiRoot,
		"state-dir":        o.stateDir,
		"dev-root":         o.devRoot,
		"mps-root":         o.mpsRoot,
		"sim-dir":          o.simDir,
		"sim-library":      o.simLibrary,
	} {
		if !filepath.IsAbs(path) && (!strings.HasPrefix(flag, "sim-") || path != "") {
			return fmt.Errorf("--%s %q: an absolute path is needed", flag, path)
		}
	}
	if (o.certFile == "") != (o.keyFile == "") {
		return fmt.Errorf("--tls-cert-file %q, --tls-private-key-file %q: want both or none", o.certFile, o.keyFile)
	}
	if err := o.exporterOptions.validate(); err != nil {
		return err
	}
	if err := o.validateUse(); err != nil {
		return err
	}
	return o.validateHardware()
}

// open finds the NVML library that the flags ask for.
func (o *options) open() (*nvml.Handle, error) {
	handle, err := nvml.Open(o.nvml, nvml.OpenOptions{
		NodeName: o.nodeName, DriverRoot: o.driverRoot, SimDir: o.simDir, SimLibrary: o.simLibrary,
	})
	if err != nil {
		return nil, fmt.Errorf("--nvml %s: %w", o.nvml, err)
	}
	return handle, nil
}
