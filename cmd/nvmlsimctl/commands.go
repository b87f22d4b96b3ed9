// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/nvmlsim"
)

func (c *client) gpuCommands() *cobra.Command {
	return group("gpu", "Whether a GPU is there and answers",
		c.onGPU("lose", "Let a GPU fall off the bus", func(gpu string) nvmlsim.Command { return &nvmlsim.LoseGPU{GPU: gpu} }),
		c.onGPU("restore", "Bring a lost GPU back", func(gpu string) nvmlsim.Command { return &nvmlsim.RestoreGPU{GPU: gpu} }),
		c.onGPU("hang", "Let calls about a GPU not return", func(gpu string) nvmlsim.Command { return &nvmlsim.HangGPU{GPU: gpu} }),
		c.onGPU("unhang", "Let them return", func(gpu string) nvmlsim.Command { return &nvmlsim.UnhangGPU{GPU: gpu} }),
		c.action("slow GPU MILLISECONDS", "Let each call that asks a GPU take so long, 0 for no time", 2,
			func(args []string) (nvmlsim.Command, error) {
				each, err := number("MILLISECONDS", args[1])
				if err != nil {
					return nil, err
				}
				return &nvmlsim.SlowGPU{GPU: args[0], Milliseconds: nvmlsim.Milliseconds(each)}, nil
			}),
		c.onGPU("reset", "Reset an idle GPU", func(gpu string) nvmlsim.Command { return &nvmlsim.ResetGPU{GPU: gpu} }),
		c.onGPU("remove", "Take a GPU off the bus", func(gpu string) nvmlsim.Command { return &nvmlsim.RemoveGPU{GPU: gpu} }),
		c.onGPU("add", "Put a removed GPU back", func(gpu string) nvmlsim.Command { return &nvmlsim.AddGPU{GPU: gpu} }),
	)
}

func (c *client) driverCommands() *cobra.Command {
	plain := func(use, short string, command nvmlsim.Command) *cobra.Command {
		return c.action(use, short, 0, func([]string) (nvmlsim.Command, error) { return command, nil })
	}
	load := nvmlsim.LoadDriver{}
	loadCommand := plain("load", "Load it again", &load)
	loadCommand.Flags().StringVar(&load.Version, "version", "", "version of the driver; the one that was loaded last if not given")
	return group("driver", "The kernel driver",
		plain("unload", "Unload the driver", &nvmlsim.UnloadDriver{}),
		loadCommand,
	)
}

func (c *client) procCommands() *cobra.Command {
	var kind, instance, pod string
	var memory uint64
	var stuck bool
	var command string
	var user uint32
	add := c.action("add GPU PID", "Start a process on a GPU or a MIG device", 2, func(args []string) (nvmlsim.Command, error) {
		pid, err := number("PID", args[1])
		if err != nil {
			return nil, err
		}
		at, err := parseInstance(instance)
		if err != nil {
			return nil, err
		}
		return &nvmlsim.AddProcess{GPU: args[0], Process: nvmlsim.Process{
			PID: pid, Kind: nvmlsim.ProcessKind(kind), MemoryMiB: memory, Instance: at, Pod: pod, Command: command, Stuck: stuck, User: user,
		}}, nil
	})
	add.Flags().StringVar(&kind, "kind", string(nvmlsim.ProcessCompute), "compute, graphics or mps")
	add.Flags().Uint64Var(&memory, "memory-mib", 0, "memory that it uses, in MiB")
	add.Flags().StringVar(&instance, "instance", "", "MIG device, as GPU instance/compute instance")
	add.Flags().StringVar(&pod, "pod", "", "UID of the pod that it belongs to")
	add.Flags().StringVar(&command, "command", "", "name of what it runs")
	add.Flags().Uint32Var(&user, "user", 0, "number of the user that it runs as")
	add.Flags().BoolVar(&stuck, "stuck", false, "it does not end when it is killed")
	remove := c.action("rm GPU PID", "End a process", 2, func(args []string) (nvmlsim.Command, error) {
		pid, err := number("PID", args[1])
		return &nvmlsim.RemoveProcess{GPU: args[0], PID: pid}, err
	})
	return group("proc", "Processes on GPUs", add, remove)
}

func (c *client) clientCommands() *cobra.Command {
	var command string
	var gpus []int
	var watches, persistenced bool
	start := func(args []string) (nvmlsim.Command, error) {
		pid, err := number("PID", args[0])
		started := nvmlsim.Client{PID: pid, Command: command, GPUs: gpus, Watches: watches}
		if persistenced {
			started.Persistence = &nvmlsim.Persistenced{}
		}
		return &nvmlsim.AddClient{Client: started}, err
	}
	add := c.action("add PID", "Start a program that has GPUs open and uses none, as nvidia-persistenced and DCGM", 1, start)
	add.Flags().StringVar(&command, "command", "", "name of what it runs")
	add.Flags().IntSliceVar(&gpus, "gpu", nil, "indices of the GPUs that it has open; all if not given")
	add.Flags().BoolVar(&watches, "watches", false, "it watches them, as DCGM does, so that MIG is in use")
	add.Flags().BoolVar(&persistenced, "persistenced", false, "it is nvidia-persistenced with its socket: it lets go of a GPU when asked")
	remove := c.action("rm PID", "End it", 1, func(args []string) (nvmlsim.Command, error) {
		pid, err := number("PID", args[0])
		return &nvmlsim.RemoveClient{PID: pid}, err
	})
	return group("client", "Programs that have GPUs open and use none", add, remove)
}

func (c *client) migCommands() *cobra.Command {
	var start int
	var compute []uint
	create := &cobra.Command{
		Use: "create GPU PROFILE", Short: "Make a MIG device, and print its UUID and instances", Args: arguments(cobra.ExactArgs(2)),
		Example: "  nvmlsimctl mig create 0 1g.10gb --start 6",
		RunE: func(cmd *cobra.Command, args []string) error {
			command := &nvmlsim.CreateMIG{GPU: args[0], Profile: args[1]}
			if cmd.Flags().Changed("start") {
				if start < 0 {
					return fmt.Errorf("--start %d: want a memory slice, 0 or more", start)
				}
				at := uint32(start)
				command.Start = &at
			}
			for _, slices := range compute {
				command.Compute = append(command.Compute, uint32(slices))
			}
			result, err := c.send(cmd, command)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s %d/%d\n", result.MIG.UUID, result.MIG.Instance.GPU, result.MIG.Instance.Compute)
			return err
		},
	}
	create.Flags().UintSliceVar(&compute, "compute", nil,
		"compute instances to make in it, by their slices; one that is all of it if not given")
	create.Flags().IntVar(&start, "start", 0, "first memory slice; the driver's choice if not given")
	destroy := c.action("destroy GPU INSTANCE", "End a GPU instance by its ID", 2, func(args []string) (nvmlsim.Command, error) {
		id, err := number("INSTANCE", args[1])
		return &nvmlsim.DestroyMIG{GPU: args[0], Instance: id}, err
	})
	return group("mig", "Partitions of GPUs", create, destroy,
		c.onGPU("enable", "Ask for MIG mode", func(gpu string) nvmlsim.Command { return &nvmlsim.SetMIG{GPU: gpu, Enabled: true} }),
		c.onGPU("disable", "Ask for the end of MIG mode", func(gpu string) nvmlsim.Command { return &nvmlsim.SetMIG{GPU: gpu} }),
	)
}

func (c *client) faultCommands() []*cobra.Command {
	var instance string
	xid := c.action("xid GPU CODE", "Report an XID", 2, func(args []string) (nvmlsim.Command, error) {
		code, err := number("CODE", args[1])
		if err != nil {
			return nil, err
		}
		at, err := parseInstance(instance)
		return &nvmlsim.RaiseXID{GPU: args[0], Code: uint64(code), Instance: at}, err
	})
	xid.Flags().StringVar(&instance, "instance", "", "MIG device that it is about, as GPU instance/compute instance")

	ecc := &nvmlsim.CountECC{}
	var eccInstance string
	eccCommand := c.action("ecc GPU", "Count memory errors", 1, func(args []string) (nvmlsim.Command, error) {
		at, err := parseInstance(eccInstance)
		ecc.GPU, ecc.Instance = args[0], at
		return ecc, err
	})
	eccCommand.Flags().Uint64Var(&ecc.Corrected, "corrected", 0, "number of single bit errors")
	eccCommand.Flags().StringVar(&eccInstance, "instance", "", "MIG device that has them, as GPU instance/compute instance")
	eccCommand.Flags().Uint64Var(&ecc.Uncorrected, "uncorrected", 0, "number of double bit errors")

	rows := &nvmlsim.RemapRows{}
	remap := c.action("remap GPU", "Replace rows of memory", 1, func(args []string) (nvmlsim.Command, error) {
		rows.GPU = args[0]
		return rows, nil
	})
	remap.Flags().IntVar(&rows.Corrected, "corrected", 0, "rows more for single bit errors")
	remap.Flags().IntVar(&rows.Uncorrected, "uncorrected", 0, "rows more for double bit errors")
	remap.Flags().BoolVar(&rows.Pending, "pending", false, "a row waits for the next reset")
	remap.Flags().BoolVar(&rows.Failed, "failed", false, "no spare row was left")

	link := &nvmlsim.SetPCIe{}
	pcie := c.action("pcie GPU best|GENERATION WIDTH", "Set the PCIe link", 0, func(args []string) (nvmlsim.Command, error) {
		link.GPU = args[0]
		if len(args) == 2 {
			if args[1] != "best" {
				return nil, fmt.Errorf("GENERATION %q: want best, or a number and WIDTH", args[1])
			}
			return link, nil
		}
		if args[1] == "best" {
			return nil, fmt.Errorf("WIDTH %q: best takes none", args[2])
		}
		generation, err := number("GENERATION", args[1])
		if err != nil {
			return nil, err
		}
		width, err := number("WIDTH", args[2])
		link.Link = &nvmlsim.PCIe{Generation: int(generation), Width: int(width)}
		return link, err
	})
	pcie.Args = arguments(cobra.RangeArgs(2, 3))
	pcie.Flags().IntVar(&link.Replays, "replays", 0, "packets more that were sent again")

	// long adds the words that the arguments may be.
	long := func(cmd *cobra.Command, text string) *cobra.Command {
		cmd.Long = cmd.Short + ".\n\n" + text
		return cmd
	}
	throttle := c.action("throttle GPU [REASON...]", "Set why a GPU runs below its clock; nothing for no reason", 0,
		func(args []string) (nvmlsim.Command, error) {
			return &nvmlsim.SetThrottle{GPU: args[0], Reasons: args[1:]}, nil
		})
	throttle.Args = arguments(cobra.MinimumNArgs(1))

	refuse := c.action("refuse GPU [SETTING...]", "Let a GPU refuse for ever that settings are changed; nothing for none", 0,
		func(args []string) (nvmlsim.Command, error) {
			command := &nvmlsim.Refuse{GPU: args[0]}
			for _, setting := range args[1:] {
				command.Settings = append(command.Settings, nvmlsim.Setting(setting))
			}
			return command, nil
		})
	refuse.Args = arguments(cobra.MinimumNArgs(1))

	load := &nvmlsim.SetLoad{}
	var loaded int
	loadCommand := c.action("load GPU", "Set what programs do to a GPU or a MIG GPU instance; what is not given is 0", 1,
		func(args []string) (nvmlsim.Command, error) {
			load.GPU = args[0]
			if loaded >= 0 {
				id := uint32(loaded)
				load.Instance = &id
			}
			return load, nil
		})
	flags := loadCommand.Flags()
	flags.IntVar(&loaded, "instance", -1, "GPU instance that it is about, by its ID; the whole GPU if not given")
	flags.Uint32Var(&load.Load.GPU, "gpu", 0, "percent of the time in which a kernel runs")
	flags.Uint32Var(&load.Load.SM, "sm", 0, "percent of the multiprocessors that are busy")
	flags.Uint32Var(&load.Load.Tensor, "tensor", 0, "percent of the time in which tensor cores are")
	flags.Uint32Var(&load.Load.Memory, "memory", 0, "percent of the memory's bandwidth")
	flags.Uint32Var(&load.Load.Encoder, "encoder", 0, "percent of the video encoder")
	flags.Uint32Var(&load.Load.Decoder, "decoder", 0, "percent of the video decoder")
	flags.Uint32Var(&load.Load.PCIeTransmit, "pcie-transmit", 0, "KB/s that the GPU sends over the bus")
	flags.Uint32Var(&load.Load.PCIeReceive, "pcie-receive", 0, "KB/s that it receives")
	flags.Uint64Var(&load.Load.NVLinkTransmit, "nvlink-transmit", 0, "KiB that the GPU has sent over NVLink")
	flags.Uint64Var(&load.Load.NVLinkReceive, "nvlink-receive", 0, "KiB that it has received")
	flags.Uint64Var(&load.Load.Energy, "energy", 0, "mJ that it has used")

	return []*cobra.Command{
		loadCommand, xid, eccCommand, remap, pcie, long(throttle, "REASON is one of "+nvmlsim.ThrottleReasons()+"."),
		long(refuse, "SETTING is one of "+nvmlsim.Settings()+"."),
		c.action("temp GPU CELSIUS|idle", "Set a GPU's temperature", 2, func(args []string) (nvmlsim.Command, error) {
			celsius, err := idleOr("CELSIUS", args[1])
			return &nvmlsim.SetTemperature{GPU: args[0], Celsius: celsius}, err
		}),
		c.action("power GPU WATTS|idle", "Set what a GPU draws", 2, func(args []string) (nvmlsim.Command, error) {
			watts, err := idleOr("WATTS", args[1])
			return &nvmlsim.SetPower{GPU: args[0], Watts: watts}, err
		}),
		long(c.action("recovery GPU ACTION|none", "Set what must be done to a GPU", 2, func(args []string) (nvmlsim.Command, error) {
			return &nvmlsim.SetRecovery{GPU: args[0], Action: nvmlsim.Recovery(unless(args[1], "none"))}, nil
		}), "ACTION is one of "+nvmlsim.Recoveries()+"."),
		long(c.action("compute-mode GPU MODE", "Set a GPU's compute mode", 2, func(args []string) (nvmlsim.Command, error) {
			return &nvmlsim.SetComputeMode{GPU: args[0], Mode: nvmlsim.ComputeMode(args[1])}, nil
		}), "MODE is one of "+nvmlsim.ComputeModes()+"."),
		long(c.action("timeslice GPU TIME|default", "Set how long a process keeps a GPU", 2, func(args []string) (nvmlsim.Command, error) {
			return &nvmlsim.SetTimeSlice{GPU: args[0], Time: nvmlsim.TimeSlice(unless(args[1], "default"))}, nil
		}), fmt.Sprintf("TIME is one of %s, %s, %s.", nvmlsim.TimeSliceShort, nvmlsim.TimeSliceMedium, nvmlsim.TimeSliceLong)),
		c.action("persistence GPU on|off", "Switch a GPU's persistence mode, as nvidia-smi does: nvidia-persistenced is asked if it runs", 2,
			func(args []string) (nvmlsim.Command, error) {
				if args[1] != "on" && args[1] != "off" {
					return nil, fmt.Errorf("MODE %q: want on or off", args[1])
				}
				return &nvmlsim.SetPersistence{GPU: args[0], Enabled: args[1] == "on"}, nil
			}),
		c.action("leak GPU MIB", "Let memory be in use that no process has", 2, func(args []string) (nvmlsim.Command, error) {
			mib, err := number("MIB", args[1])
			return &nvmlsim.LeakMemory{GPU: args[0], MemoryMiB: uint64(mib)}, err
		}),
		c.action("stop-mps DAEMON", "End an MPS daemon, as if it had crashed", 1, func(args []string) (nvmlsim.Command, error) {
			return &nvmlsim.StopMPS{Daemon: args[0]}, nil
		}),
		c.action("reboot", "Reboot the machine", 0, func([]string) (nvmlsim.Command, error) { return &nvmlsim.Reboot{}, nil }),
	}
}

// shownState is a state whose GPUs have names.
type shownState struct {
	*nvmlsim.State
	GPUs []shownGPU `json:"gpus"`
}

type shownGPU struct {
	nvmlsim.GPUName
	nvmlsim.GPUState
}

func (c *client) stateCommand() *cobra.Command {
	output := "yaml"
	cmd := &cobra.Command{
		Use: "state", Short: "Print the state of the machine", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "yaml" && output != "json" {
				return fmt.Errorf("--output %q: want yaml or json", output)
			}
			result, err := c.send(cmd, &nvmlsim.ShowState{})
			if err != nil {
				return err
			}
			shown := shownState{State: result.State}
			for i := range result.State.GPUs {
				shown.GPUs = append(shown.GPUs, shownGPU{result.GPUs[i], result.State.GPUs[i]})
			}
			if output == "json" {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(shown)
			}
			document, err := yaml.Marshal(shown)
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(document)
			return err
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", output, "yaml or json")
	return cmd
}

func number(name, value string) (uint32, error) {
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%s %q: want a number", name, value)
	}
	return uint32(n), nil
}

// idleOr returns nil for what an idle GPU has.
func idleOr(name, value string) (*uint32, error) {
	if value == "idle" {
		return nil, nil
	}
	n, err := number(name, value)
	if err != nil {
		return nil, fmt.Errorf("%s %q: want a number or idle", name, value)
	}
	return &n, nil
}

// unless returns a word, or nothing for the word that stands for nothing.
func unless(word, nothing string) string {
	if word == nothing {
		return ""
	}
	return word
}

// parseInstance reads "3/0"; nothing is no MIG device.
func parseInstance(s string) (*nvmlsim.Instance, error) {
	if s == "" {
		return nil, nil
	}
	gpu, compute, found := strings.Cut(s, "/")
	g, err := number("--instance", gpu)
	c, errCompute := number("--instance", compute)
	if !found || err != nil || errCompute != nil {
		return nil, fmt.Errorf("--instance %q: want GPU instance/compute instance, such as 3/0", s)
	}
	return &nvmlsim.Instance{GPU: g, Compute: c}, nil
}
