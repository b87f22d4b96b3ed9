// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package vfio

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// poll is the pause between two looks at what the kernel has done.
const poll = 20 * time.Millisecond

// Binder changes the drivers of functions. Its methods may be called concurrently, and find it done what was done
// before. They end with ctx, at the latest; what the kernel does not finish then goes on, and holds up only what is
// to be done to the same function later.
type Binder struct {
	sysfs Sysfs
	// changing has a place for each function, taken while something is done to it.
	changing sync.Map
}

// NewBinder returns the binder for a kernel.
func NewBinder(sysfs Sysfs) *Binder { return &Binder{sysfs: sysfs} }

// Sysfs is what the binder sees.
func (b *Binder) Sysfs() Sysfs { return b.sysfs }

// Take gives the function to vfio-pci. Nobody may use it: its driver would not let go.
func (b *Binder) Take(ctx context.Context, address string) error {
	return b.change(ctx, address, func(c *change) error {
		// First, so that no other driver gets it in between.
		if err := c.override(Driver); err != nil {
			return err
		}
		if c.Driver != "" && c.Driver != Driver {
			if err := c.unbind(); err != nil {
				return err
			}
		}
		return c.bind(Driver)
	})
}

// GiveBack takes the function from vfio-pci and gives it the driver and the override that it had before; an empty driver is none.
// A function that another driver has by now stays there: somebody else wants it so.
func (b *Binder) GiveBack(ctx context.Context, address, driver, override string) error {
	return b.change(ctx, address, func(c *change) error {
		if c.Override == Driver {
			if err := c.override(override); err != nil {
				return err
			}
		}
		if c.Driver == Driver {
			if err := c.unbind(); err != nil {
				return err
			}
		}
		if c.Driver != "" || driver == "" {
			return nil
		}
		return c.bind(driver)
	})
}

// Override returns the only driver that may have the function, empty for any that matches.
func (b *Binder) Override(ctx context.Context, address string) (string, error) {
	var override string
	if err := b.change(ctx, address, func(c *change) error {
		override = c.Override
		return nil
	}); err != nil {
		return "", err
	}
	return override, nil
}

// change is what is being done to a function, and how the function is.
type change struct {
	Function
	// Override is the only driver that may have it, empty for any that matches.
	Override string
	ctx      context.Context
	sysfs    Sysfs
	// asked is what the kernel has been asked for and has not finished.
	asked atomic.Pointer[string]
}

// change does f, which has the function to itself. When ctx ends it does not wait for a read or a write that hangs; nothing else is done to
// the function until that has returned.
func (b *Binder) change(ctx context.Context, address string, f func(*change) error) error {
	place, _ := b.changing.LoadOrStore(address, make(chan struct{}, 1))
	taken := place.(chan struct{})
	select {
	case taken <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("the kernel has not finished an earlier read or write for PCI function %s, which somebody uses: %w", address, ctx.Err())
	}
	c := &change{ctx: ctx, sysfs: b.sysfs}
	done := make(chan error, 1)
	go func() {
		err := c.read(address)
		if err == nil {
			err = f(c)
		}
		<-taken
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	if asked := c.asked.Load(); asked != nil {
		return fmt.Errorf("the kernel does not finish %s, because somebody uses the PCI function: %w", *asked, ctx.Err())
	}
	// It ends by itself, and says why.
	return <-done
}

// read finds out how the function is.
func (c *change) read(address string) (err error) {
	if c.Function, err = ReadFunction(c.sysfs, address); err != nil {
		return err
	}
	return c.ask("a read of "+overrideOf(address), func() error {
		c.Override, err = readOverride(c.sysfs, address)
		return err
	})
}

// override makes the driver the only one that may have the function; an empty one takes that back.
func (c *change) override(driver string) error {
	if c.Override == driver {
		return nil
	}
	if err := c.write(overrideOf(c.Address), driver+"\n"); err != nil {
		return err
	}
	c.Override = driver
	return nil
}

// unbind takes the function from its driver.
func (c *change) unbind() error {
	driver := c.Driver
	if err := c.write(devices+"/"+c.Address+"/driver/unbind", c.Address); err != nil {
		return fmt.Errorf("take PCI function %s from the driver %s: %w", c.Address, driver, err)
	}
	return c.await(func() bool { return c.Driver == "" }, "still")
}

// bind gives the function, which has none, to a driver.
func (c *change) bind(driver string) error {
	if c.Driver == driver {
		return nil
	}
	if !exists(c.sysfs, drivers+"/"+driver) {
		return fmt.Errorf("give PCI function %s to the driver %s: it is not loaded", c.Address, driver)
	}
	if err := c.write(drivers+"/"+driver+"/bind", c.Address); err != nil {
		return fmt.Errorf("give PCI function %s to the driver %s: %w", c.Address, driver, err)
	}
	return c.await(func() bool { return c.Driver == driver }, "and not with "+driver)
}

// await looks at the function until the kernel says that it is as it should be.
func (c *change) await(done func() bool, otherwise string) error {
	err := wait.PollUntilContextCancel(c.ctx, poll, true, func(context.Context) (bool, error) {
		now, err := ReadFunction(c.sysfs, c.Address)
		if err != nil {
			return false, err
		}
		c.Function = now
		return done(), nil
	})
	if err != nil {
		return fmt.Errorf("PCI function %s is with the driver %q, %s: %w", c.Address, c.Driver, otherwise, err)
	}
	return nil
}

func (c *change) write(name, value string) error {
	return c.ask("a write to "+name, func() error { return c.sysfs.Write(name, value) })
}

// ask does what may not return. It begins nothing when the time is over.
func (c *change) ask(what string, f func() error) error {
	c.asked.Store(&what)
	defer c.asked.Store(nil)
	// After that is stored, or change could wait for what it does not see.
	if err := c.ctx.Err(); err != nil {
		return err
	}
	return f()
}
