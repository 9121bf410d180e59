// An attribute of the charts: at a press of the mouse button. Two clicks in a chart write a range of
// steps into the field above the charts, a double click none. The first click is noted in that field,
// since the charts are drawn anew meanwhile. Nothing depends on it: a range can be typed.

const s=event.target.closest('[data-steps]');
const f=this.closest('.na-panel')?.querySelector('.na-range input');
if(event.button||!s||!f)return;
const b=s.getBoundingClientRect(),[a,z]=s.dataset.steps.split(' ').map(Number);
const x=Math.round(a+(z-a)*(event.clientX-b.left)/b.width),m=f.value.match(/^(-?\d+) to$/);
f.value=!m?x+' to':Math.abs(m[1]-x)<(z-a)/100?'':Math.min(m[1],x)+' to '+Math.max(m[1],x);
if(m)f.dispatchEvent(new Event('change',{bubbles:true}))
